"""What keeps a memory small, whole and true: recovery, maintenance, repair, deletion, diagnosis."""
