"""`nguide doctor`: the command, its checks, and what they look at."""
