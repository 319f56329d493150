//! What a launch file may say: pure data and its validation.
