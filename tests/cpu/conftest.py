"""Settings of the tests of the CPU engine."""

import logging

# torch describes every step of an export to this logger as soon as anybody, such as pytest, listens.
logging.getLogger("torch.__trace").propagate = False
