"""The command `lapwing`: the one part of the library that prints."""
