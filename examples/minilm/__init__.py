"""The all-MiniLM-L6-v2 sentence encoder as a Tessera model function, and a semantic search with it."""
