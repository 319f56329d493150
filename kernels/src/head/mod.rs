//! The output head: logits and what is read of them, in one pass over the weights.
//!
//! Owner: an executor owns one [`Head`] (scratch). A worker multiplies some hundred outputs for up to 64 rows into a
//! buffer that stays in its cache, reads from there what the rows want, and goes on to the next free ones. The logits
//! reach memory only for rows that are kept. Invariant: sums are those of chunks of 512 ids, put together in order, so
//! what is said of a row depends neither on the batch nor on the threads. Ties go to the lowest id.

pub mod cuda;
mod reduce;

use crate::Pool;
use crate::matmul::{self, Input, Matrix, ROWS_PER_PASS, TILE};
use crate::memory::Disjoint;
pub use reduce::{BadLogits, Candidate, Distribution, Want};
use reduce::{State, Sums};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Ids per chunk: whole tiles, few enough that 16 threads have the same to do, many enough that rows are read in one go.
const CHUNK: usize = 512;
/// Distance of the rows in a worker's buffer: a line more, so that a tile's rows do not all fall on the same few sets of
/// the cache.
const STRIDE: usize = CHUNK + TILE;

/// What [`Head::run`] multiplies and who wants what of it.
pub struct Product<'a> {
    /// Hidden rows.
    pub input: &'a Input<'a>,
    /// The head, `[ids, hidden]`.
    pub matrix: &'a Matrix,
    /// One for each row.
    pub wants: &'a [Want],
    /// An id that is no part of the row: its logit is kept apart and counts as minus infinity, unless it is NaN or plus
    /// infinity, which stays to be found.
    pub apart: Option<usize>,
    /// `[rows, ids]`; only the rows to be kept are written.
    pub logits: &'a mut [f32],
}

/// What a row of logits says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outcome<'a> {
    /// The largest entry among the tokens, the lowest id among equals.
    pub best: Candidate,
    /// The softmax of the whole row, if wanted.
    pub distribution: Option<Distribution>,
    /// The largest entries of the whole row in descending order, equal ones by ascending id. NaN and minus infinity are
    /// left out, so there may be fewer than wanted.
    pub top: &'a [Candidate],
    /// The same among the tokens.
    pub real_top: &'a [Candidate],
}

/// Scratch and results; grows to the largest batch and then allocates no more.
#[derive(Debug, Default)]
pub struct Head {
    workers: Vec<Worker>,
    /// `[rows, chunks]`, of rows that want a distribution.
    sums: Vec<Sums>,
    chunks: usize,
    wants: Vec<Want>,
    apart: Vec<f32>,
}

/// What one worker has for itself.
#[derive(Debug, Default)]
struct Worker {
    /// `[rows of a pass, STRIDE]`
    logits: Vec<f32>,
    rows: Vec<State>,
}

impl Head {
    /// Multiplies, reads, and writes the rows that are kept.
    ///
    /// # Panics
    /// If sizes do not fit, a row has no tokens, or the input lacks the codes that a quantised matrix needs.
    pub fn run(&mut self, pool: &Pool, product: Product<'_>) {
        let Product { input, matrix, wants, apart, logits } = product;
        let (rows, ids) = (input.rows(), matrix.rows());
        assert!(ids <= u32::MAX as usize, "ids have 32 bits");
        assert!(wants.len() == rows && wants.iter().all(|want| want.real > 0), "each of {rows} rows wants something");
        assert!(!wants.iter().any(|want| want.keep) || logits.len() == rows * ids, "size of the kept rows");
        self.prepare(pool.threads(), wants, ids);
        let job = Job {
            input,
            matrix,
            wants,
            apart,
            chunks: self.chunks,
            logits: Disjoint::new(logits),
            sums: Disjoint::new(&mut self.sums),
            set_apart: Disjoint::new(&mut self.apart),
        };
        let (workers, next) = (Disjoint::new(&mut self.workers), AtomicUsize::new(0));
        pool.run(pool.threads().min(job.chunks), &|worker| {
            // SAFETY: each worker is one task.
            let [worker] = (unsafe { workers.part(worker..worker + 1) }) else { return };
            loop {
                let chunk = next.fetch_add(1, Ordering::Relaxed);
                if chunk >= job.chunks {
                    break;
                }
                job.chunk(pool, chunk, worker);
            }
        });
        if let Some((first, others)) = self.workers.split_first_mut() {
            for other in others {
                for (row, other) in first.rows[..rows].iter_mut().zip(&other.rows) {
                    row.absorb(other);
                }
            }
        }
    }

    fn prepare(&mut self, threads: usize, wants: &[Want], ids: usize) {
        let rows = wants.len();
        self.chunks = ids.div_ceil(CHUNK);
        self.workers.resize_with(threads, Worker::default);
        for worker in &mut self.workers {
            worker.logits.resize(worker.logits.len().max(rows.min(ROWS_PER_PASS) * STRIDE), 0.0);
            worker.rows.resize_with(worker.rows.len().max(rows), State::default);
            for (row, want) in worker.rows.iter_mut().zip(wants) {
                row.begin(want, ids);
            }
        }
        self.wants.clear();
        self.wants.extend_from_slice(wants);
        self.sums.resize(rows * self.chunks, Sums::default());
        self.apart.clear();
        self.apart.resize(rows, 0.0);
    }

    /// What row `row` of the last run says.
    ///
    /// # Errors
    /// [`BadLogits`] when its tokens, or with a distribution the whole row, are no distribution.
    ///
    /// # Panics
    /// If there was no such row.
    pub fn row(&self, row: usize) -> Result<Outcome<'_>, BadLogits> {
        let (want, state) = (&self.wants[row], &self.workers[0].rows[row]);
        if let Some(fault) = state.fault() {
            return Err(fault);
        }
        let sums = &self.sums[row * self.chunks..][..self.chunks];
        Ok(Outcome {
            best: state.best,
            distribution: want.distribution.then(|| reduce::distribution(sums)),
            top: state.top.list(),
            real_top: state.real_top.list(),
        })
    }

    /// The logits that the last run set apart, one for each row; zeros if it set none apart.
    pub fn apart(&self) -> &[f32] {
        &self.apart
    }
}

/// A product as its workers see it.
struct Job<'a> {
    input: &'a Input<'a>,
    matrix: &'a Matrix,
    wants: &'a [Want],
    apart: Option<usize>,
    chunks: usize,
    logits: Disjoint<'a, f32>,
    sums: Disjoint<'a, Sums>,
    set_apart: Disjoint<'a, f32>,
}

impl Job<'_> {
    /// One chunk for all rows.
    fn chunk(&self, pool: &Pool, index: usize, worker: &mut Worker) {
        let first = index * CHUNK;
        let len = CHUNK.min(self.matrix.rows() - first);
        let tiles = first / TILE..(first + len).div_ceil(TILE);
        for start in (0..self.input.rows()).step_by(ROWS_PER_PASS) {
            let rows = start..(start + ROWS_PER_PASS).min(self.input.rows());
            let part = matmul::Part {
                input: self.input,
                rows: rows.clone(),
                tiles: tiles.clone(),
                y: &mut worker.logits,
                stride: STRIDE,
            };
            matmul::tiles(pool, self.matrix, part);
            for (row, logits) in rows.zip(worker.logits.chunks_exact_mut(STRIDE)) {
                let logits = &mut logits[..len];
                self.set_apart(row, (logits, first));
                let want = &self.wants[row];
                let sums = worker.rows[row].read(pool.isa(), (logits, first), want);
                if want.distribution {
                    let at = row * self.chunks + index;
                    // SAFETY: each (row, chunk) is read by one worker.
                    unsafe { self.sums.part(at..at + 1) }.fill(sums);
                }
                if want.keep {
                    let at = row * self.matrix.rows() + first;
                    // SAFETY: as above.
                    unsafe { self.logits.part(at..at + len) }.copy_from_slice(logits);
                }
            }
        }
    }

    fn set_apart(&self, row: usize, (logits, first): (&mut [f32], usize)) {
        let Some(logit) = self.apart.and_then(|id| logits.get_mut(id.checked_sub(first)?)) else { return };
        // SAFETY: the id lies in one chunk, and each (row, chunk) is read by one worker.
        unsafe { self.set_apart.part(row..row + 1) }.fill(*logit);
        if *logit < f32::INFINITY {
            *logit = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
mod tests;
