"""The commands of the command line, a module a theme. Each reads flags, calls one function, prints what came back."""
