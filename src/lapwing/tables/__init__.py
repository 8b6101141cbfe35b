"""What a person runs: everything else in lapwing is a library and prints nothing."""
