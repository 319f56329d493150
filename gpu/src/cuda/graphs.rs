//! Shapes of steps, and the graphs that were recorded of them. Owner: the device. Invariant: a step is played from a graph
//! of the smallest shape that has room for it, or given launch by launch if there is none; graphs share the memory of the
//! steps they record.

use crate::ops::Shape;
use std::collections::HashMap;
use tokenrouter_core::executor::ExecutorLimits;
use tokenrouter_kernels::cuda::{CudaError, Graph, StepLimits, Stream};

/// Shapes that are recorded: each number of requests with each number of tokens. Empty = none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GraphGrid {
    rows: Vec<usize>,
    tokens: Vec<usize>,
}

impl GraphGrid {
    /// Of these numbers of requests and of tokens of each, in any order.
    pub fn new(mut rows: Vec<usize>, mut tokens: Vec<usize>) -> Self {
        for list in [&mut rows, &mut tokens] {
            list.retain(|&number| number > 0);
            list.sort_unstable();
            list.dedup();
        }
        GraphGrid { rows, tokens }
    }

    fn shape_for(&self, rows: usize, longest: usize) -> Option<Shape> {
        let least = |list: &[usize], wanted| list.iter().copied().find(|&number| number >= wanted);
        Some(Shape { rows: least(&self.rows, rows)?, tokens: least(&self.tokens, longest)? })
    }

    /// All shapes within limits, the largest first.
    pub fn shapes(&self, rows_max: usize, tokens_max: usize) -> Vec<Shape> {
        let all = self.rows.iter().flat_map(|&rows| self.tokens.iter().map(move |&tokens| Shape { rows, tokens }));
        let mut shapes: Vec<Shape> =
            all.filter(|shape| shape.rows <= rows_max && shape.rows * shape.tokens <= tokens_max).collect();
        shapes.sort_unstable_by_key(|shape| std::cmp::Reverse((shape.rows * shape.tokens, shape.rows)));
        shapes
    }
}

/// Which graph: the shape, and whether the learned head is part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) shape: Shape,
    pub(super) scored: bool,
}

#[derive(Debug)]
pub(super) struct Graphs {
    grid: GraphGrid,
    recorded: HashMap<Key, Graph>,
}

impl Graphs {
    pub(super) fn new(grid: GraphGrid) -> Self {
        Graphs { grid, recorded: HashMap::new() }
    }

    pub(super) fn shapes(&self, limits: &ExecutorLimits) -> Vec<Shape> {
        self.grid.shapes(limits.rows_max as usize, limits.step_tokens_max as usize)
    }

    pub(super) fn shape_for(&self, rows: usize, longest: usize, limits: &StepLimits) -> Option<Shape> {
        let shape = self.grid.shape_for(rows, longest)?;
        (shape.rows <= limits.rows && shape.rows * shape.tokens <= limits.tokens).then_some(shape)
    }

    pub(super) fn contains(&self, key: Key) -> bool {
        self.recorded.contains_key(&key)
    }

    /// Keeps a graph, sent to the device ahead of its first launch.
    pub(super) fn insert(&mut self, key: Key, mut graph: Graph, stream: &Stream) -> Result<(), CudaError> {
        graph.upload(stream)?;
        self.recorded.insert(key, graph);
        Ok(())
    }

    pub(super) fn launch(&mut self, key: Key, stream: &Stream) -> Result<(), CudaError> {
        self.recorded.get_mut(&key).map_or(Ok(()), |graph| graph.launch(stream))
    }

    pub(super) fn len(&self) -> usize {
        self.recorded.len()
    }

    /// Forgets all: memory that they use has moved.
    pub(super) fn clear(&mut self) {
        self.recorded.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_take_the_smallest_shape_that_has_room() {
        let grid = GraphGrid::new(vec![8, 1, 4, 4], vec![4, 1, 0]);
        assert_eq!(grid.shape_for(1, 1), Some(Shape { rows: 1, tokens: 1 }));
        assert_eq!(grid.shape_for(2, 3), Some(Shape { rows: 4, tokens: 4 }));
        assert_eq!((grid.shape_for(9, 1), grid.shape_for(1, 5)), (None, None));
        let sizes: Vec<(usize, usize)> = grid.shapes(8, 16).iter().map(|shape| (shape.rows, shape.tokens)).collect();
        assert_eq!(sizes, [(4, 4), (8, 1), (4, 1), (1, 4), (1, 1)], "32 tokens are too many");
        assert_eq!(GraphGrid::default().shape_for(1, 1), None);
    }
}
