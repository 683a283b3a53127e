"""Python source to Tile IR: an abstract interpreter over Python's syntax tree."""
