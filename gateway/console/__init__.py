"""The web console: pages in the package, and sessions by which a browser administers as an admin key does."""
