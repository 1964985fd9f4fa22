"""Features on disk: the store that training reads, memory-mapped."""
