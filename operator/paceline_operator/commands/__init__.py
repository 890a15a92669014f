"""The words of the `paceline` command, one module each with a `main(arguments)` that returns the exit code."""
