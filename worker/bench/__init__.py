"""The engine alone, without HTTP: how fast it is, how smooth its streams are, and against whom."""
