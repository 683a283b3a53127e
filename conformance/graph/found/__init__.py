"""Programs that fuzzing found to be wrong on some engine, and small relatives of them."""
