"""Schedule planning: the legal schedules of a whole function for a target, ranked by a model, and measured."""
