"""The sweep: every op with every element type on shapes and values that expose errors."""
