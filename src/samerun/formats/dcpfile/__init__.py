"""The files of torch.distributed.checkpoint: `.metadata` as columns, items inside `.distcp` files, evidence on both.

Shared by the formats that are written through it; what tensors mean is the business of each format.
"""
