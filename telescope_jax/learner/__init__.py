"""The loss, the update and the state that training changes."""
