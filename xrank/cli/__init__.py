"""The command line: a module for each command, or for those of one subject, with its options; nothing is decided here.

To add an option, add a click option to the command's module, its section of the help in `xrank.cli.help`, and a
parameter of the same name to the function that it calls: ``xrank gather`` calls
`xrank.commands.gather.gather_checkpoint`. Options that several commands have are in `xrank.cli.options`; those of all
commands and of commands that ranks share in `xrank.cli.command`. An option about how a model is converted, not which
source is read, is also a field of that name of `xrank.recipes.options.GatherOptions`, which checks it; if it changes
the bytes of an output and not its plan, add it to `xrank.recipes.decision.FolderPlan.digest`, too, so that an
interrupted output is not resumed with another value. A parameter whose option has another name is listed in
`xrank.errors`, so that errors show each caller its own.
"""
