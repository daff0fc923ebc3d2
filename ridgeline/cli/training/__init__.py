"""What the verbs have for training: its ranks and jobs, and `--train` of profile and optimize."""
