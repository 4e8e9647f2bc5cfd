"""Scripts of whole algorithms with options, which tests and benchmarks run."""
