"""Uses of curvature: functions and small classes made of a risk and an operator."""
