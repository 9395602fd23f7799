"""The command line: a command parses, makes settings, makes one library call, prints.

Nothing heavy is imported before a command runs, so that ``--help`` answers at once.
"""

__all__: list[str] = []
