"""What holds for all tests."""

import signal

# a shell that starts them in the background has them ignore Ctrl-C, and every process that they start
signal.signal(signal.SIGINT, signal.default_int_handler)
