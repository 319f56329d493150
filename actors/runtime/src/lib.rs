//! How the actors talk: one subserver per model, five children each.
