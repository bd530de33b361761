"""What this project promises, seen from outside: plain Lightning trainings with the callback, and without it."""
