"""What people see of a verb's result: tables and drawings in the terminal."""
