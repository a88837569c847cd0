"""One torch.save file per rank: replicas, pickled DTensors, or bare shards that do not say where they belong."""
