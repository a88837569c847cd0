"""What a checkpoint holds, by value: digests, checksums, differences, coverage."""
