"""`python -m torch_nimble`, which is the command `torch-nimble`."""

from torch_nimble.cli import main

main()
