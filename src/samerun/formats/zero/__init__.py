"""DeepSpeed's native checkpoints: ZeRO stages 0 to 3, with data, tensor, pipeline and expert parallelism."""
