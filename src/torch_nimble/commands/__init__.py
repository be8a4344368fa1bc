"""What the commands of `torch-nimble` do, one module each; the command line itself is `cli.py`."""
