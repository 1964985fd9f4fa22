"""The command ``nguide``: one thin module per stage.

`normal_guidance.cli.commands` lists the commands, `normal_guidance.cli.endings` says how they end.  This file imports
nothing: `main` must handle signals before it imports the commands.
"""
