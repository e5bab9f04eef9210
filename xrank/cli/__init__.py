"""The command line: one module for each command, with its options; nothing is decided here.

To add an option, add a click option to the command's module (options of all commands: `xrank.cli.command`), and a
parameter of the same name to the function that it calls: ``xrank gather`` calls
`xrank.conversion.gather.gather_checkpoint`. `xrank.decisions.options` checks the options of conversions. A parameter
whose option has another name is listed in `xrank.faces`, so that errors show each caller its own.
"""
