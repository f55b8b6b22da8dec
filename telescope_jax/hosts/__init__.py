"""One trainer in several processes: process 0 leads, the others follow."""
