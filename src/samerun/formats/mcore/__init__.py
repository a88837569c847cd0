"""What both Megatron formats share: the run's arguments, its layout, the order of parameters, and flat buffers."""
