//! This process among those a server is made of: which models are here, where the others are, and numbers that no two
//! processes share. Owner: the runtime. Invariant: checked once at the start, constant afterwards.

use super::Address;
use crate::gpu_executor::Seat;
use crate::runtime::{MODELS_MAX, ModelSpec};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use tokenrouter_core::faults::LinkFaults;
use tokenrouter_core::ids::RequestId;

/// Bits of a request's number below the millisecond of its arrival.
const NUMBERS_PER_MS_BITS: u32 = 20;

/// Where a model is.
#[derive(Clone, Debug)]
pub enum Site {
    /// In this process, on this device.
    Here(Seat),
    /// In the process that listens there.
    Peer(Address),
}

impl Site {
    /// The address of the process, when it is another.
    pub fn peer(&self) -> Option<&Address> {
        match self {
            Site::Here(_) => None,
            Site::Peer(address) => Some(address),
        }
    }
}

/// Which TCP addresses are taken. Frames are neither encrypted nor authenticated, so whoever reaches the port can read
/// and write requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// Only those of the loopback interface.
    #[default]
    Loopback,
    /// Any; the network must be trusted.
    Network,
}

/// This process among those of a server.
#[derive(Clone, Debug)]
pub struct Process {
    /// Where its peers reach it; `None` when all models are here.
    pub listen: Option<Address>,
    /// Which TCP addresses are taken.
    pub reach: Reach,
    /// Which life of this process: higher than that of every process that had its place before. Milliseconds.
    pub life: u64,
    /// What goes wrong, on order, with the messages of its models to each other and to peers.
    pub faults: Vec<LinkFaults>,
}

impl Process {
    /// The only one.
    pub fn alone() -> Self {
        Process { listen: None, reach: Reach::Loopback, life: 0, faults: Vec::new() }
    }

    /// One of several, started now.
    pub fn among_peers(listen: Address) -> Self {
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let life = u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX);
        Process { listen: Some(listen), life, ..Process::alone() }
    }

    /// Whether the models can be where they are said to be.
    ///
    /// # Errors
    /// A line that names the setting and the remedy.
    pub fn check(&self, models: &[ModelSpec]) -> Result<(), String> {
        let peers = || models.iter().filter_map(|model| Some((model, model.site.peer()?)));
        if peers().count() == models.len() {
            return Err("no model is in this process; give at least one a device here".into());
        }
        let Some(listen) = &self.listen else {
            return peers().next().map_or(Ok(()), |(model, address)| {
                let name = &model.name;
                Err(format!("model {name} is at {address} but this process listens nowhere; give it a listen address"))
            });
        };
        if let Some((model, _)) = peers().find(|(_, address)| *address == listen) {
            return Err(format!("model {} is said to be at {listen}, which is this process itself", model.name));
        }
        let exposed = |address: &&Address| matches!(address, Address::Tcp(at) if !at.ip().is_loopback());
        let exposed = std::iter::once(listen).chain(peers().map(|(_, address)| address)).find(exposed);
        match exposed.filter(|_| self.reach == Reach::Loopback) {
            None => Ok(()),
            Some(address) => Err(format!(
                "{address} is not a loopback address, and frames are not encrypted; allow the network explicitly \
                 or use a loopback address"
            )),
        }
    }
}

/// Processes of a server with these models.
pub fn count(models: &[ModelSpec]) -> usize {
    1 + models.iter().filter_map(|model| model.site.peer()).collect::<HashSet<_>>().len()
}

/// Numbers the requests that enter here: growing with arrival, and never one that another process, or an earlier life
/// of this one, gives out. Alone: 1, 2, 3. Among peers: milliseconds since 1970, then a counter, then the process.
#[derive(Debug)]
pub struct Numbers {
    last: AtomicU64,
    /// Start in milliseconds and index of the first model here; `None` = alone.
    shared: Option<(u64, u64)>,
}

impl Numbers {
    /// Of a process with these models.
    pub fn new(process: &Process, models: &[ModelSpec]) -> Self {
        let first = models.iter().position(|model| model.site.peer().is_none()).unwrap_or(0) as u64;
        let shared = process.listen.is_some().then_some((process.life, first));
        Numbers { last: AtomicU64::new(0), shared }
    }

    /// The next, at this time since the start.
    pub fn next(&self, now: Duration) -> RequestId {
        let after = |last: u64| match self.shared {
            None => last + 1,
            Some((life, process)) => {
                let ms = life.saturating_add(u64::try_from(now.as_millis()).unwrap_or(u64::MAX));
                (last + MODELS_MAX as u64).max((ms << NUMBERS_PER_MS_BITS) | process)
            }
        };
        let last = self.last.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| Some(after(last)));
        RequestId(after(last.unwrap_or_else(|last| last)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tokenrouter_core::executor::{ExecutorError, ExecutorLimits};

    fn model(name: &str, peer: Option<&str>) -> ModelSpec {
        let limits = ExecutorLimits { pages: 8, rows_max: 4, step_tokens_max: 64, context_len: 128, vocab_width: 100 };
        let here = || Site::Here(Seat::Thread(Arc::new(|| Err(ExecutorError::Lost("never built".into())))));
        let site = peer.map_or_else(here, |at| Site::Peer(at.parse().expect("an address")));
        ModelSpec { name: name.to_owned(), limits, eos: Vec::new(), site }
    }

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let check = |listen: Option<&str>, peers: &[Option<&str>], expected: Result<(), &str>| {
            let models: Vec<ModelSpec> = peers.iter().map(|peer| model("m", *peer)).collect();
            let listen = listen.map(|at| at.parse().expect("an address"));
            let outcome = Process { listen, ..Process::alone() }.check(&models);
            match expected {
                Ok(()) => assert_eq!(outcome, Ok(())),
                Err(part) => assert!(outcome.clone().is_err_and(|text| text.contains(part)), "{outcome:?}"),
            }
        };
        check(None, &[None, None], Ok(()));
        check(Some("unix:a"), &[None, Some("unix:b")], Ok(()));
        check(Some("tcp:127.0.0.1:1"), &[None, Some("tcp:[::1]:2")], Ok(()));
        check(None, &[None, Some("unix:b")], Err("listens nowhere"));
        check(Some("unix:a"), &[Some("unix:b"), Some("unix:b")], Err("no model is in this process"));
        check(Some("unix:a"), &[None, Some("unix:a")], Err("this process itself"));
        check(Some("tcp:0.0.0.0:1"), &[None, Some("tcp:127.0.0.1:2")], Err("tcp:0.0.0.0:1 is not a loopback"));
        check(Some("unix:a"), &[None, Some("tcp:10.0.0.1:2")], Err("tcp:10.0.0.1:2 is not a loopback"));
    }

    #[test]
    fn no_two_processes_or_lives_give_out_the_same_number() {
        let place = |here: usize| -> Vec<ModelSpec> {
            (0..3).map(|index| model("m", (index != here).then_some("unix:b"))).collect()
        };
        let numbers = |here: usize, life: u64| {
            let process = Process { listen: Some("unix:a".parse().expect("an address")), life, ..Process::alone() };
            Numbers::new(&process, &place(here))
        };
        let mut seen = HashSet::new();
        for (here, life) in [(0, 1000), (1, 1000), (2, 1000), (0, 1009)] {
            let numbers = numbers(here, life);
            let mut last = RequestId(0);
            for at in [0, 0, 0, 1, 1, 8, 2, 3] {
                let next = numbers.next(Duration::from_millis(at));
                assert!(next > last && seen.insert(next), "{next} after {last}");
                last = next;
            }
        }
        let alone = Numbers::new(&Process::alone(), &[model("m", None)]);
        assert_eq!([0, 5, 5].map(|at| alone.next(Duration::from_millis(at)).0), [1, 2, 3]);
        assert_eq!(count(&place(1)), 2);
    }
}
