"""One file that torch.save wrote, holding a model or a whole training state in any of the usual nestings."""
