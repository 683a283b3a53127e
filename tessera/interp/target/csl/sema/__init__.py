"""The meaning of CSL text: names, types, comptime evaluation, and Python code for what runs on a PE."""
