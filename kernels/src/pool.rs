//! The worker pool of one model.
//!
//! Owner: one executor thread per pool calls [`Pool::run`] and works as its first worker; the other workers belong to
//! the pool and end with it. Workers spin for a moment after a job (the next operation of the same step usually comes
//! within microseconds) and then park. A call allocates nothing.
//!
//! Invariant: `remaining > 0` only while `run` is on the stack of its caller and `job` describes that call. A worker
//! that took a task (decremented `remaining`) holds `run` back until it reports in `done`, so the borrowed closure
//! outlives its use. Which worker runs which task is a race; tasks must not depend on it.

use crate::KernelError;
use crate::sys::{self, Isa};
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};

/// Rounds of spinning before a worker parks: some tens of microseconds, longer than the gaps within a step.
const SPINS_BEFORE_PARK: usize = 4_000;
/// Rounds of spinning before the caller offers its core to the worker it waits for.
const SPINS_BEFORE_YIELD: usize = 2_000;
/// More workers than any machine has; catches a typo in a launch file.
const THREADS_MAX: usize = 1024;

/// How a pool is built.
#[derive(Debug, Clone, Default)]
pub struct PoolConfig {
    /// Threads that work, the caller of `run` included. 0 takes one per usable core.
    pub threads: usize,
    /// Cores for the threads: worker `i` is pinned to `cores[i % len]`. Empty leaves placement to the system. The
    /// caller is worker 0 and pins itself with [`sys::pin_current_thread`].
    pub cores: Vec<usize>,
    /// Instruction set; `None` takes the best of this machine.
    pub isa: Option<Isa>,
}

/// A fixed set of worker threads that share the tasks of one call at a time.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held during a call, so that calls from several threads follow one another.
    turn: Mutex<()>,
    isa: Isa,
}

/// A borrowed closure without its lifetime, valid while its `run` call lasts.
#[derive(Clone, Copy)]
struct Job {
    work: *const (dyn Fn(usize) + Sync),
    tasks: usize,
}

struct Shared {
    job: UnsafeCell<Job>,
    /// Tasks of the current job that nobody took yet.
    remaining: AtomicUsize,
    /// Tasks of the current job that ended.
    done: AtomicUsize,
    closing: AtomicBool,
    parked: Vec<Parked>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

struct Parked {
    asleep: AtomicBool,
    thread: Mutex<Option<Thread>>,
}

// SAFETY: `job` is written only while `remaining` is 0 and the turn is held, and read only after a task was taken
// from `remaining` (acquire); see the invariant of this module. All else is atomics and locks.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is only used as described above; its closure is `Sync`.
unsafe impl Send for Shared {}

impl Pool {
    /// Starts the workers.
    ///
    /// Errors: a core or an instruction set that this process lacks, too many threads, or a refused thread.
    pub fn new(config: &PoolConfig) -> Result<Pool, KernelError> {
        let isa = config.isa.unwrap_or_else(Isa::detect);
        if !isa.available() {
            return Err(KernelError::Isa { isa: isa.name() });
        }
        let usable = sys::usable_cores();
        if let Some(&core) = config.cores.iter().find(|core| !usable.contains(core)) {
            return Err(KernelError::Core { core, reason: "it is not available to this process".into(), usable });
        }
        let threads = if config.threads == 0 { sys::default_threads() } else { config.threads };
        if threads > THREADS_MAX {
            return Err(KernelError::Size { what: "a thread count", size: threads, max: THREADS_MAX });
        }
        let idle: *const (dyn Fn(usize) + Sync) = &|_| {};
        let shared = Arc::new(Shared {
            job: UnsafeCell::new(Job { work: idle, tasks: 0 }),
            remaining: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            parked: (1..threads).map(|_| Parked { asleep: AtomicBool::new(false), thread: Mutex::new(None) }).collect(),
            panic: Mutex::new(None),
        });
        let mut pool = Pool { shared, workers: Vec::with_capacity(threads - 1), turn: Mutex::new(()), isa };
        for index in 1..threads {
            let core = (!config.cores.is_empty()).then(|| config.cores[index % config.cores.len()]);
            let shared = pool.shared.clone();
            let spawned = std::thread::Builder::new().name(format!("kernel-{index}")).spawn(move || {
                if let Some(core) = core {
                    // A refusal (checked above, so rare) only costs speed.
                    let _ = sys::pin_current_thread(&[core]);
                }
                shared.work_until_closed(index - 1);
            });
            let handle = spawned.map_err(|e| KernelError::Thread { index, reason: e.to_string() })?;
            *lock(&pool.shared.parked[index - 1].thread) = Some(handle.thread().clone());
            pool.workers.push(handle);
        }
        Ok(pool)
    }

    /// Threads that work, the caller of `run` included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// The instruction set of the kernels that run with this pool.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Runs `work(0)`, ..., `work(tasks - 1)`, each once, in any order and on any worker, and returns when all ended.
    ///
    /// # Panics
    /// When a task panics: with its payload, after all tasks ended. A task must not call `run` of the same pool.
    pub fn run(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
        if self.workers.is_empty() || tasks <= 1 {
            (0..tasks).for_each(work);
            return;
        }
        let turn = lock(&self.turn);
        // SAFETY: only the lifetime changes. The pointer is used by tasks of this call alone, and this call does not
        // return before all of them ended.
        let work = unsafe {
            std::mem::transmute::<*const (dyn Fn(usize) + Sync + '_), *const (dyn Fn(usize) + Sync + 'static)>(work)
        };
        // SAFETY: the turn is held and `remaining` is 0, so nobody reads `job`.
        unsafe { *self.shared.job.get() = Job { work, tasks } };
        self.shared.done.store(0, Ordering::Relaxed);
        self.shared.remaining.store(tasks, Ordering::SeqCst);
        self.shared.wake();
        while self.shared.work_on_one_task() {}
        let mut spins = 0;
        while self.shared.done.load(Ordering::Acquire) < tasks {
            spins += 1;
            if spins < SPINS_BEFORE_YIELD { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        let panic = lock(&self.shared.panic).take();
        drop(turn);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Splits `0..items` into about four ranges per thread (one if there are fewer than `grain` items) and runs `work`
    /// on each.
    pub(crate) fn run_ranges(&self, items: usize, grain: usize, work: &(dyn Fn(std::ops::Range<usize>) + Sync)) {
        let pieces = (items / grain.max(1)).clamp(1, 4 * self.threads());
        let size = items.div_ceil(pieces).max(1);
        self.run(items.div_ceil(size), &|task| work(task * size..((task + 1) * size).min(items)));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::SeqCst);
        self.shared.wake();
        for worker in self.workers.drain(..) {
            // Panics of tasks are caught in the worker, so there is no payload to pass on.
            let _ = worker.join();
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pool({} threads, {})", self.threads(), self.isa.name())
    }
}

impl Shared {
    /// Takes one task and runs it; false when none is left.
    fn work_on_one_task(&self) -> bool {
        let mut remaining = self.remaining.load(Ordering::Acquire);
        loop {
            if remaining == 0 {
                return false;
            }
            match self.remaining.compare_exchange_weak(remaining, remaining - 1, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                Err(now) => remaining = now,
            }
        }
        // SAFETY: this thread took a task and has not reported it, so `job` is not written and its closure is alive.
        let (work, tasks) = unsafe {
            let job = *self.job.get();
            (&*job.work, job.tasks)
        };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(tasks - remaining))) {
            lock(&self.panic).get_or_insert(payload);
        }
        self.done.fetch_add(1, Ordering::Release);
        true
    }

    fn work_until_closed(&self, index: usize) {
        let parked = &self.parked[index];
        loop {
            while self.work_on_one_task() {}
            let mut spins = 0;
            while self.remaining.load(Ordering::Relaxed) == 0 && spins < SPINS_BEFORE_PARK {
                std::hint::spin_loop();
                spins += 1;
            }
            if self.closing.load(Ordering::SeqCst) {
                return;
            }
            if spins == SPINS_BEFORE_PARK {
                // Announce first, look again, then sleep: `wake` stores first and looks at the announcement after.
                parked.asleep.store(true, Ordering::SeqCst);
                while self.remaining.load(Ordering::SeqCst) == 0
                    && !self.closing.load(Ordering::SeqCst)
                    && parked.asleep.load(Ordering::SeqCst)
                {
                    std::thread::park();
                }
                parked.asleep.store(false, Ordering::SeqCst);
            }
        }
    }

    fn wake(&self) {
        for parked in &self.parked {
            if parked.asleep.swap(false, Ordering::SeqCst)
                && let Some(thread) = lock(&parked.thread).as_ref()
            {
                thread.unpark();
            }
        }
    }
}

/// The data under these locks is replaced as a whole, so a panic of another holder leaves it valid.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::rounds;

    fn pool(threads: usize) -> Pool {
        Pool::new(&PoolConfig { threads, ..Default::default() }).unwrap()
    }

    #[test]
    fn every_task_runs_exactly_once() {
        for threads in 1..=4 {
            let pool = pool(threads);
            assert_eq!(pool.threads(), threads);
            for round in 0..rounds(2000) {
                let tasks = (round * 5 + 3) % 37;
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(tasks, &|task| {
                    counts[task].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{threads} threads, {tasks} tasks");
            }
        }
    }

    #[test]
    fn workers_wake_after_they_parked() {
        let pool = pool(3);
        let sum = AtomicUsize::new(0);
        for _ in 0..5 {
            while !pool.shared.parked.iter().all(|p| p.asleep.load(Ordering::SeqCst)) {
                std::thread::yield_now();
            }
            pool.run(10, &|task| {
                sum.fetch_add(task, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.load(Ordering::Relaxed), 5 * 45);
    }

    #[test]
    fn a_panic_of_a_task_reaches_the_caller_and_the_pool_lives_on() {
        let pool = pool(2);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            pool.run(8, &|task| assert!(task != 5, "task five"));
        }));
        assert!(outcome.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(8, &|task| {
            sum.fetch_add(task, Ordering::Relaxed);
        });
        assert_eq!(sum.load(Ordering::Relaxed), 28);
    }

    #[test]
    fn calls_from_several_threads_follow_one_another() {
        let (pool, calls) = (pool(2), rounds(200));
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..calls {
                        pool.run(7, &|task| {
                            sum.fetch_add(task, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), 3 * calls * 21);
    }

    #[test]
    fn ranges_cover_all_items_once() {
        for (threads, items, grain) in [(1, 0, 1), (1, 10, 3), (3, 100, 1), (3, 5, 100), (2, 17, 0)] {
            let pool = pool(threads);
            let seen = Mutex::new(vec![0; items]);
            pool.run_ranges(items, grain, &|range| range.for_each(|i| seen.lock().unwrap()[i] += 1));
            assert!(seen.into_inner().unwrap().iter().all(|&n| n == 1));
        }
    }

    #[test]
    fn impossible_configurations_are_refused() {
        let missing = sys::usable_cores().into_iter().max().unwrap() + 1;
        let config = PoolConfig { threads: 1, cores: vec![missing], isa: None };
        assert!(matches!(Pool::new(&config), Err(KernelError::Core { core, .. }) if core == missing));
        assert!(Pool::new(&PoolConfig { threads: 1 << 20, ..Default::default() }).is_err());
    }
}
