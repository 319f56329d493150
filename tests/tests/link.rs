//! One server in several processes, over real sockets: users read what the definition of the algorithm says; a cut or
//! a kill ends what it touched with a clear error, frees its memory everywhere, and nothing else; later requests work.

use actix_rt::task::JoinHandle;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokenrouter_actors::link::Address;
use tokenrouter_actors::link::identity::Identity;
use tokenrouter_actors::link::wire::{Answer, Hello, PROTOCOL, decode, encode, read_frame};
use tokenrouter_actors::runtime::{Runtime, StartError, start};
use tokenrouter_core::executor::Needs;
use tokenrouter_core::ids::ModelIdx;
use tokenrouter_core::job::{Failure, FinishReason, Refusal};
use tokenrouter_core::rng::mix;
use tokenrouter_core::routing::{Algorithm, Prior, Route};
use tokenrouter_tests::processes::{Ask, Heard, Town, follow, is_connected, unrest};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

/// Whatever is waited for must have come by then.
const DEADLINE: Duration = Duration::from_secs(30);

/// A folder for sockets, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tr-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder for sockets");
        Folder(path)
    }

    fn socket(&self, name: &str) -> Address {
        Address::Unix(self.0.join(name))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("the folder is there");
    }
}

fn on_sockets<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    actix_rt::System::new().block_on(async { test().await });
}

/// Polls until it holds.
async fn until(what: &str, mut holds: impl FnMut() -> Result<(), String>) {
    let begin = Instant::now();
    while let Err(why) = holds() {
        assert!(begin.elapsed() < DEADLINE, "{what}: {why}");
        actix_rt::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn connected(runtimes: &[&Runtime]) {
    let all = || runtimes.iter().all(|runtime| is_connected(runtime));
    until("peers are connected", || all().then_some(()).ok_or_else(|| "not yet".to_owned())).await;
}

async fn at_rest(runtimes: &[&Runtime]) {
    until("all is at rest", || runtimes.iter().find_map(|runtime| unrest(runtime)).map_or(Ok(()), Err)).await;
}

async fn stop(runtimes: &[&Runtime]) {
    for runtime in runtimes {
        runtime.drain(Duration::ZERO).await;
    }
}

fn check(town: &Town, ask: Ask, heard: &Heard) {
    let expected = town.expected(ask);
    match &heard.end {
        Ok(reason) => {
            assert_eq!(*reason, FinishReason::Length, "{ask:?}");
            assert_eq!(heard.told, expected, "{ask:?}");
        }
        Err(_) => assert_eq!(heard.told, expected[..heard.told.len()], "{ask:?}"),
    }
}

async fn ended(task: JoinHandle<Heard>) -> Heard {
    tokio::time::timeout(DEADLINE, task).await.expect("a request is stuck").expect("a request is followed")
}

/// An algorithm whose requests enter at the model their seed says.
#[derive(Debug)]
struct ManyDoors(Arc<dyn Algorithm>, u64);

impl Algorithm for ManyDoors {
    fn needs(&self, model: ModelIdx) -> Needs {
        self.0.needs(model)
    }

    fn entry(&self, seed: u64) -> ModelIdx {
        ModelIdx((seed % self.1) as u8)
    }

    fn prior(&self) -> Prior {
        self.0.prior()
    }

    fn start(&self) -> Box<dyn Route> {
        self.0.start()
    }
}

/// Many requests at once, entering at every process, through every pair of models.
fn check_texts(name: &'static str, homes: &'static [usize], thresholds: &'static [u32]) {
    on_sockets(|| async move {
        let folder = Folder::new(name);
        let mut town = Town { thresholds: thresholds.to_vec(), ..Town::restless(homes, Duration::ZERO) };
        town.algorithm = Arc::new(ManyDoors(town.algorithm.clone(), homes.len() as u64));
        let processes = 1 + homes.iter().max().expect("a model");
        let addresses: Vec<Address> = (0..processes).map(|process| folder.socket(&process.to_string())).collect();
        let runtimes: Vec<Runtime> =
            (0..processes).map(|me| start(town.spec(me, &addresses)).expect("it starts")).collect();
        let all: Vec<&Runtime> = runtimes.iter().collect();
        connected(&all).await;
        let asks: Vec<Ask> = (0..60u64)
            .map(|index| {
                let only = (index % 7 == 0).then_some(index as usize % homes.len());
                Ask { seed: mix(index), max: 1 + (mix(index) % 90) as u32, only }
            })
            .collect();
        let tasks: Vec<_> = asks
            .iter()
            .map(|&ask| {
                let entry = ask.only.unwrap_or((ask.seed % homes.len() as u64) as usize);
                actix_rt::spawn(follow(runtimes[homes[entry]].clone(), ask, |_| {}))
            })
            .collect();
        for (task, &ask) in tasks.into_iter().zip(&asks) {
            let heard = ended(task).await;
            assert!(heard.end.is_ok(), "{ask:?}: {:?}", heard.end);
            check(&town, ask, &heard);
        }
        at_rest(&all).await;
        let hops: u64 = runtimes.iter().flat_map(|runtime| runtime.snapshot().models).map(hops).sum();
        assert!(hops > 500, "{hops} hops");
        stop(&all).await;
    });
}

fn hops(model: tokenrouter_actors::runtime::ModelSnapshot) -> u64 {
    model.inter_model.hops.iter().sum()
}

#[test]
fn two_processes_say_what_one_would() {
    check_texts("two", &[0, 1], &[]);
}

/// Tokens of one request come to its home over two connections here, and may overtake each other.
#[test]
fn three_models_in_two_processes_say_what_one_would() {
    check_texts("three-two", &[0, 1, 1], &[]);
}

#[test]
fn three_processes_with_delayed_batches_say_what_one_would() {
    check_texts("three", &[0, 1, 2], &[1, 3, 2]);
}

#[test]
fn a_request_enters_where_its_first_model_is() {
    on_sockets(|| async {
        let folder = Folder::new("enter");
        let town = Town::restless(&[0, 1], Duration::ZERO);
        let addresses = [folder.socket("a"), folder.socket("b")];
        let other = start(town.spec(1, &addresses)).expect("it starts");
        let refusal = other.submit(Ask { seed: 1, max: 3, only: None }.job()).await.expect_err("it is not here");
        let text = refusal.to_string();
        assert!(matches!(refusal, Refusal::Unavailable(_)) && text.contains(&addresses[0].to_string()), "{text}");
        assert!(text.contains("model-0"), "{text}");
        stop(&[&other]).await;
    });
}

/// What both processes see of each other goes through here and can be cut.
struct Wire {
    generation: watch::Sender<u64>,
    open: Rc<Cell<bool>>,
}

impl Wire {
    fn new(at: &Address, to: &Address) -> Self {
        let (Address::Unix(at), Address::Unix(to)) = (at, to) else { panic!("Unix sockets only") };
        let (listener, to) = (UnixListener::bind(at).expect("a free address"), to.clone());
        let (generation, cuts) = watch::channel(0);
        let open = Rc::new(Cell::new(true));
        let lets_in = Rc::clone(&open);
        actix_rt::spawn(async move {
            while let Ok((mut near, _)) = listener.accept().await {
                if !lets_in.get() {
                    continue;
                }
                let (to, mut cut) = (to.clone(), cuts.clone());
                cut.mark_unchanged();
                actix_rt::spawn(async move {
                    let Ok(mut far) = UnixStream::connect(to).await else { return };
                    tokio::select! {
                        _ = copy_bidirectional(&mut near, &mut far) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Wire { generation, open }
    }

    /// Every connection ends, in the middle of whatever it carries.
    fn cut(&self) {
        self.generation.send_modify(|generation| *generation += 1);
    }

    /// Lets in connections from now on, or ends each at once.
    fn set_open(&self, open: bool) {
        self.open.set(open);
    }
}

/// Processes that see each other through wires.
struct Mesh {
    town: Town,
    processes: Vec<Runtime>,
    /// By who sees and who is seen.
    wires: BTreeMap<(usize, usize), Wire>,
    _folder: Folder,
}

impl Mesh {
    async fn start(name: &str, homes: &[usize], step: Duration) -> Self {
        let folder = Folder::new(name);
        let town = Town::restless(homes, step);
        let count = 1 + homes.iter().max().expect("a model");
        let own: Vec<Address> = (0..count).map(|process| folder.socket(&process.to_string())).collect();
        let mut wires = BTreeMap::new();
        let processes: Vec<Runtime> = (0..count)
            .map(|me| {
                let mut seen = own.clone();
                for peer in (0..count).filter(|&peer| peer != me) {
                    seen[peer] = folder.socket(&format!("{me}-{peer}"));
                    wires.insert((me, peer), Wire::new(&seen[peer], &own[peer]));
                }
                start(town.spec(me, &seen)).expect("it starts")
            })
            .collect();
        let mesh = Mesh { town, processes, wires, _folder: folder };
        connected(&mesh.all()).await;
        mesh
    }

    fn all(&self) -> Vec<&Runtime> {
        self.processes.iter().collect()
    }

    async fn serves(&self, seeds: std::ops::Range<u64>) {
        for seed in seeds {
            let ask = Ask { seed, max: 30, only: None };
            let heard = ended(actix_rt::spawn(follow(self.processes[0].clone(), ask, |_| {}))).await;
            assert_eq!(heard.end, Ok(FinishReason::Length), "{ask:?}");
            check(&self.town, ask, &heard);
        }
    }

    async fn ends(self) {
        at_rest(&self.all()).await;
        stop(&self.all()).await;
    }
}

/// Starts requests and waits until each has tokens.
async fn under_way(runtime: &Runtime, asks: &[Ask]) -> Vec<JoinHandle<Heard>> {
    let begun = Rc::new(Cell::new(0));
    let tasks = asks.iter().map(|&ask| {
        let begun = Rc::clone(&begun);
        let mut first = true;
        actix_rt::spawn(follow(runtime.clone(), ask, move |_| {
            if std::mem::take(&mut first) {
                begun.set(begun.get() + 1);
            }
        }))
    });
    let tasks = tasks.collect();
    until("requests are under way", || match begun.get() == asks.len() {
        true => Ok(()),
        false => Err(format!("{} of {}", begun.get(), asks.len())),
    })
    .await;
    tasks
}

fn long(seed: u64) -> Ask {
    Ask { seed, max: 900, only: None }
}

fn assert_lost(heard: &Heard, model: &str) {
    match &heard.end {
        Err(Failure::Internal(text)) => assert!(text.contains(model), "{text}"),
        other => panic!("not lost but {other:?}"),
    }
}

/// A cut in the middle of many requests, while one that stays at home goes on beside them.
fn check_cut(name: &'static str, cut: fn(&Mesh)) {
    on_sockets(|| async move {
        let mesh = Mesh::start(name, &[0, 1], Duration::from_millis(1)).await;
        let asks: Vec<Ask> = (0..8).map(long).collect();
        let routed = under_way(&mesh.processes[0], &asks).await;
        let alone = Ask { seed: 99, max: 300, only: Some(0) };
        let beside = under_way(&mesh.processes[0], &[alone]).await;
        cut(&mesh);
        for (task, &ask) in routed.into_iter().zip(&asks) {
            let heard = ended(task).await;
            assert_lost(&heard, "model-");
            check(&mesh.town, ask, &heard);
        }
        for task in beside {
            let heard = ended(task).await;
            assert_eq!(heard.end, Ok(FinishReason::Length));
            check(&mesh.town, alone, &heard);
        }
        at_rest(&mesh.all()).await;
        mesh.wires.values().for_each(|wire| wire.set_open(true));
        connected(&mesh.all()).await;
        mesh.serves(0..10).await;
        mesh.ends().await;
    });
}

#[test]
fn a_cut_both_ways_ends_what_was_under_way() {
    check_cut("cut-both", |mesh| {
        mesh.wires.values().for_each(Wire::cut);
    });
}

#[test]
fn a_cut_on_the_way_out_ends_what_was_under_way() {
    check_cut("cut-out", |mesh| mesh.wires[&(0, 1)].cut());
}

#[test]
fn a_cut_on_the_way_back_ends_what_was_under_way() {
    check_cut("cut-back", |mesh| mesh.wires[&(1, 0)].cut());
}

/// The peer stays away for a while.
#[test]
fn an_absence_ends_what_was_under_way() {
    check_cut("cut-away", away);
}

fn away(mesh: &Mesh) {
    for wire in mesh.wires.values() {
        wire.set_open(false);
        wire.cut();
    }
}

#[test]
fn requests_that_need_a_peer_fail_while_it_is_away() {
    on_sockets(|| async {
        let mesh = Mesh::start("away", &[0, 1], Duration::ZERO).await;
        away(&mesh);
        until("the absence is seen", || match is_connected(&mesh.processes[0]) {
            false => Ok(()),
            true => Err("still connected".to_owned()),
        })
        .await;
        for seed in 0..20 {
            let heard = ended(actix_rt::spawn(follow(mesh.processes[0].clone(), long(seed), |_| {}))).await;
            assert_lost(&heard, "model-1");
            check(&mesh.town, long(seed), &heard);
        }
        mesh.ends().await;
    });
}

/// Cuts at random moments of a random load: every request ends, none says anything wrong, nothing is left.
fn check_random_cuts(name: &'static str, homes: &'static [usize], rounds: u64) {
    on_sockets(|| async move {
        let mesh = Mesh::start(name, homes, Duration::from_micros(200)).await;
        let (mut failed, mut finished) = (0, 0);
        for round in 0..rounds {
            let asks: Vec<Ask> = (0..6).map(|index| Ask { max: 150, ..long(mix(round * 6 + index)) }).collect();
            let tasks = under_way(&mesh.processes[0], &asks[..3]).await;
            let more: Vec<_> =
                asks[3..].iter().map(|&ask| actix_rt::spawn(follow(mesh.processes[0].clone(), ask, |_| {}))).collect();
            // How far the requests get before the cut, and what is cut, is up to the seed.
            for _ in 0..mix(round) % 40 {
                tokio::task::yield_now().await;
            }
            let cuts = 1 + (mix(round) >> 8) % ((1 << mesh.wires.len()) - 1);
            let cut = mesh.wires.values().enumerate().filter(|(index, _)| cuts >> index & 1 == 1);
            cut.for_each(|(_, wire)| wire.cut());
            for (task, &ask) in tasks.into_iter().chain(more).zip(&asks) {
                let heard = ended(task).await;
                check(&mesh.town, ask, &heard);
                match heard.end {
                    Ok(_) => finished += 1,
                    Err(_) => failed += 1,
                }
            }
            at_rest(&mesh.all()).await;
            connected(&mesh.all()).await;
        }
        assert!(failed > rounds, "{failed} failed, {finished} finished: the cuts came too late");
        mesh.serves(0..10).await;
        mesh.ends().await;
    });
}

#[test]
fn random_cuts_between_two_processes_leave_nothing_behind() {
    check_random_cuts("cut-two", &[0, 1, 1], 20);
}

#[test]
fn random_cuts_between_three_processes_leave_nothing_behind() {
    check_random_cuts("cut-three", &[0, 1, 2], 20);
}

/// A process of its own; killed when it is dropped.
struct Sim(Child);

impl Sim {
    fn start(requests: u64, addresses: &[Address; 2], me: usize) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sim_process"));
        command.args([me.to_string(), "0,1".to_owned(), "1".to_owned(), requests.to_string()]);
        command.args(addresses.iter().map(Address::to_string)).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("the process starts");
        let mut line = String::new();
        let said = child.stdout.take().expect("an output");
        BufReader::new(said).read_line(&mut line).expect("a line");
        assert_eq!(line, "ready\n");
        Sim(child)
    }

    /// SIGKILL.
    fn kill(mut self) {
        self.0.kill().expect("it runs");
        self.0.wait().expect("it ends");
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        if self.0.try_wait().is_ok_and(|end| end.is_none()) {
            self.0.kill().expect("it runs");
            self.0.wait().expect("it ends");
        }
    }
}

#[test]
fn a_killed_peer_ends_what_it_had_and_serves_again_when_it_is_back() {
    on_sockets(|| async {
        let folder = Folder::new("kill-peer");
        let addresses = [folder.socket("home"), folder.socket("peer")];
        let town = Town::restless(&[0, 1], Duration::from_millis(1));
        let home = start(town.spec(0, &addresses)).expect("it starts");
        for round in 0..3u64 {
            // In a thread of its own, because the process says that it is ready only when it can reach this one.
            let at = addresses.clone();
            let peer = tokio::task::spawn_blocking(move || Sim::start(0, &at, 1)).await.expect("a thread");
            connected(&[&home]).await;
            let short = Ask { seed: round, max: 40, only: None };
            let heard = ended(actix_rt::spawn(follow(home.clone(), short, |_| {}))).await;
            assert_eq!(heard.end, Ok(FinishReason::Length));
            check(&town, short, &heard);
            let asks: Vec<Ask> = (0..6).map(|index| long(round * 100 + index)).collect();
            let alone = Ask { seed: round, max: 200, only: Some(0) };
            let routed = under_way(&home, &asks).await;
            let beside = actix_rt::spawn(follow(home.clone(), alone, |_| {}));
            peer.kill();
            for (task, &ask) in routed.into_iter().zip(&asks) {
                let heard = ended(task).await;
                assert_lost(&heard, "model-1");
                check(&town, ask, &heard);
            }
            let heard = ended(beside).await;
            assert_eq!(heard.end, Ok(FinishReason::Length));
            check(&town, alone, &heard);
            at_rest(&[&home]).await;
        }
        stop(&[&home]).await;
    });
}

#[test]
fn the_requests_of_a_killed_home_leave_its_peers() {
    on_sockets(|| async {
        let folder = Folder::new("kill-home");
        let addresses = [folder.socket("home"), folder.socket("peer")];
        let town = Town::restless(&[0, 1], Duration::from_millis(1));
        let peer = start(town.spec(1, &addresses)).expect("it starts");
        for _ in 0..3 {
            let at = addresses.clone();
            let home = tokio::task::spawn_blocking(move || Sim::start(5, &at, 0)).await.expect("a thread");
            until("the peer holds requests", || {
                let model = &peer.snapshot().models[1];
                let all = model.kv.leases == 5 && model.batcher.live == 5;
                all.then_some(()).ok_or_else(|| format!("{model:?}"))
            })
            .await;
            home.kill();
            at_rest(&[&peer]).await;
        }
        stop(&[&peer]).await;
    });
}

/// What the gate answers to these bytes, until it ends the connection.
async fn said(at: &Address, bytes: &[u8]) -> Vec<u8> {
    let Address::Unix(path) = at else { panic!("Unix sockets only") };
    let mut stream = UnixStream::connect(path).await.expect("the gate is open");
    // It may end the connection before it has read all.
    let written = stream.write_all(bytes).await.and(stream.shutdown().await);
    let mut answer = Vec::new();
    let read = tokio::time::timeout(DEADLINE, stream.read_to_end(&mut answer)).await.expect("the connection ends");
    assert!(read.is_ok() || written.is_err() || answer.is_empty(), "{read:?}");
    answer
}

#[test]
fn strangers_are_refused_with_both_values() {
    on_sockets(|| async {
        let folder = Folder::new("stranger");
        let addresses = [folder.socket("a"), folder.socket("b")];
        let town = Town::restless(&[0, 1], Duration::ZERO);
        let runtimes = [0, 1].map(|me| start(town.spec(me, &addresses)).expect("it starts"));
        connected(&[&runtimes[0], &runtimes[1]]).await;
        let server = identity(&town);
        let hello = |change: &dyn Fn(&mut Hello)| {
            let mut hello = Hello { protocol: PROTOCOL, from: ModelIdx(0), to: ModelIdx(1), server: server.clone() };
            change(&mut hello);
            encode(&hello).expect("it can be written")
        };
        let refused = [
            (hello(&|hello| hello.protocol = 77), vec!["protocol 77".to_owned(), PROTOCOL.to_string()]),
            (hello(&|hello| hello.server.vocab_size = 7), vec!["vocabulary size: 200 here, 7".to_owned()]),
            (hello(&|hello| hello.server.algorithm.push('x')), vec!["algorithm: Bernoulli".to_owned()]),
            (
                hello(&|hello| hello.server.models[1].name = "other".to_owned()),
                vec!["model-0, other at the".to_owned()],
            ),
            (hello(&|hello| hello.from = ModelIdx(1)), vec!["m1 is not in another process".to_owned()]),
            (hello(&|hello| hello.from = ModelIdx(9)), vec!["m9 is not in another process".to_owned()]),
            (hello(&|hello| hello.to = ModelIdx(0)), vec!["m0 is not in the process".to_owned()]),
        ];
        for (bytes, parts) in refused {
            let answer = said(&addresses[1], &bytes).await;
            let content = read_frame(&mut &answer[..], usize::MAX).await.expect("a frame");
            let Answer::Refused(reason) = decode(&content).expect("an answer") else { panic!("welcome") };
            assert!(parts.iter().all(|part| reason.contains(part)), "{reason}");
        }
        for round in 0..40u64 {
            let noise: Vec<u8> = (0..round * 7).map(|at| mix(round ^ (at << 32)) as u8).collect();
            let mut after_hello = hello(&|_| {});
            after_hello.extend(&noise);
            said(&addresses[1], &noise).await;
            said(&addresses[1], &after_hello).await;
        }
        connected(&[&runtimes[0], &runtimes[1]]).await;
        let ask = Ask { seed: 5, max: 40, only: None };
        let heard = ended(actix_rt::spawn(follow(runtimes[0].clone(), ask, |_| {}))).await;
        check(&town, ask, &heard);
        at_rest(&[&runtimes[0], &runtimes[1]]).await;
        stop(&[&runtimes[0], &runtimes[1]]).await;
    });
}

fn identity(town: &Town) -> Identity {
    let spec = town.spec(0, &[Address::Unix("a".into()), Address::Unix("b".into())]);
    Identity::new(&spec.models, spec.codec.vocab_size(), &*spec.algorithm, &spec.batching)
}

#[test]
fn an_abandoned_socket_is_replaced_and_a_living_one_is_not() {
    on_sockets(|| async {
        let folder = Folder::new("abandoned");
        let addresses = [folder.socket("a"), folder.socket("b")];
        let town = Town::restless(&[0, 1], Duration::ZERO);
        let Address::Unix(path) = &addresses[0] else { panic!("Unix sockets only") };
        drop(std::os::unix::net::UnixListener::bind(path).expect("a free address"));
        assert!(path.exists(), "a dead process leaves its socket");
        let first = start(town.spec(0, &addresses)).expect("the abandoned socket is replaced");
        let second = start(town.spec(0, &addresses)).expect_err("a process listens there");
        assert!(matches!(&second, StartError::Listen { address, .. } if *address == addresses[0]), "{second}");
        stop(&[&first]).await;
        until("the socket is removed", || (!path.exists()).then_some(()).ok_or_else(String::new)).await;
    });
}
