"""What moves frames from one rank to another: one folder for each kind, and the connection that
they share."""
