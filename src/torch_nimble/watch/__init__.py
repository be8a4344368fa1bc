"""What a plan was made from, and whether it still is so: weights, modules, plain data, optimizers."""
