"""`nguide doctor`: the command, its checks, and the facts that they use."""
