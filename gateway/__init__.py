"""Everything that waits: HTTP, SQL, sockets, processes. Never a tensor."""
