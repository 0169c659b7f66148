"""The memory of this process: the C library's allocator, the resident set, and errors for lack of memory."""
