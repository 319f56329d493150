//! Every interleaving of the batchers and the live counts, for a few models and requests: an explorer of all states that
//! can be reached, over the very gate, clamp and live table of the runtime. Between them are message queues that keep
//! the order of each pair and nothing else. Requests arrive, move, end and are given up at every point.
//!
//! There is no time here, so no request is ever released because it waited long enough. What is shown is therefore more
//! than the runtime needs: where nothing runs and no message is on its way, nobody waits, and everybody knows how many
//! requests are live. `MODEL_CHECK=large` explores more of the same (minutes, and some gigabytes).

use std::collections::{HashSet, VecDeque};
use std::hash::{DefaultHasher, Hasher};
use std::time::Duration;
use tokenrouter_core::batching::{Gate, Policy, PolicySpec, Verdict, Waiting, clamp};
use tokenrouter_core::ids::{ModelIdx, Time};
use tokenrouter_core::live::{LiveNotes, LiveTable};

/// What waits at a gate.
struct Guest(u8);

impl Waiting for Guest {
    fn since(&self) -> Time {
        Time(0)
    }

    fn is_pinned(&self) -> bool {
        false
    }
}

/// Thresholds that are as high as can be, at another model for every number of live requests.
#[derive(Debug)]
struct Swings(usize);

impl Policy for Swings {
    fn thresholds(&self, live: u32) -> Vec<u32> {
        (0..self.0).map(|model| if model == live as usize % self.0 { live } else { 1 }).collect()
    }
}

/// How thresholds are chosen in a check.
#[derive(Clone, Copy, Debug)]
enum Thresholds {
    Fixed(&'static [u32]),
    Swinging,
}

impl Thresholds {
    fn build(self, models: usize) -> Box<dyn Policy> {
        match self {
            Thresholds::Fixed(thresholds) => PolicySpec::Fixed(thresholds.to_vec()).build(models).expect("thresholds"),
            Thresholds::Swinging => Box::new(Swings(models)),
        }
    }
}

/// What is explored.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    models: usize,
    requests: u8,
    thresholds: Thresholds,
    /// Messages between the actors of one subserver are delayed too, not only those between subservers.
    inside: bool,
    /// Requests enter at the models below this one.
    homes: u8,
    /// Users who may go away, at most.
    aborts: u8,
    /// A fault on purpose: models do not tell their peers how many are live.
    silent: bool,
}

/// Client -> InterModel.
#[derive(Clone, Debug)]
enum Word {
    OwnLive(u32),
    Release(u8),
}

/// InterModel -> Batcher.
#[derive(Clone, Debug)]
enum Order {
    LiveNow(u32),
    Enqueue(u8),
    Release(u8),
}

/// InterModel -> InterModel.
#[derive(Clone, Debug)]
enum Frame {
    Live(LiveNotes),
    Request(u8, LiveNotes),
    Emit(u8),
    Release(u8),
}

/// Where control of a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Spot {
    Nowhere,
    Moving,
    Waiting(u8),
    Running(u8),
}

/// The actors of one model.
#[derive(Clone, Debug)]
struct Subserver {
    table: LiveTable,
    /// What the gate was told last.
    live: u32,
    /// Requests known to have ended, a bit each: by InterModel, and by Decode and Batcher.
    ended: [u8; 2],
    words: VecDeque<Word>,
    /// Client -> Batcher.
    fresh: VecDeque<u8>,
    orders: VecDeque<Order>,
    /// From here to each model.
    frames: Vec<VecDeque<Frame>>,
}

#[derive(Clone, Debug)]
struct State {
    servers: Vec<Subserver>,
    spots: Vec<Spot>,
    homes: Vec<u8>,
    /// Streams that are open, a bit each.
    open: u8,
    /// Users who may still go away.
    aborts: u8,
}

/// Something that may happen next.
#[derive(Clone, Copy, Debug)]
enum Act {
    Arrive {
        home: u8,
    },
    Abort {
        request: u8,
    },
    Word {
        model: usize,
    },
    Fresh {
        model: usize,
    },
    Order {
        model: usize,
    },
    Frame {
        from: usize,
        to: usize,
    },
    /// `to`: a model, or none when the request has ended.
    Step {
        request: u8,
        to: Option<u8>,
    },
}

/// Two states that differ in nothing that can ever matter have the same text: requests that are over are left out, the
/// others are numbered by what they do, and stamps by their order.
struct Text {
    bytes: Vec<u8>,
    /// New numbers of the requests, by old; [`OVER`] for those that are left out.
    names: Vec<u8>,
    /// Stamps by origin that are somewhere, in order.
    stamps: Vec<Vec<u64>>,
}

const OVER: u8 = u8::MAX;

impl Text {
    fn of(state: &State) -> Vec<u8> {
        let mut text = Text { bytes: Vec::with_capacity(256), names: names(state), stamps: stamps(state) };
        text.bytes.extend([state.spots.len() as u8, state.aborts]);
        let mut order: Vec<usize> = (0..text.names.len()).filter(|&at| text.names[at] != OVER).collect();
        order.sort_by_key(|&at| text.names[at]);
        for &at in &order {
            let spot = spot_byte(state.spots[at]);
            text.bytes.extend([spot, state.homes[at], u8::from(state.is_open(at as u8))]);
        }
        for server in &state.servers {
            text.server(server, &order);
        }
        text.bytes
    }

    fn server(&mut self, server: &Subserver, order: &[usize]) {
        self.notes(&server.table.notes());
        self.bytes.push(server.live as u8);
        for ended in server.ended {
            self.bytes.push(order.iter().enumerate().map(|(new, &old)| (ended >> old & 1) << new).sum());
        }
        for word in &server.words {
            match *word {
                Word::OwnLive(count) => self.bytes.extend([1, count as u8]),
                Word::Release(request) => self.request(2, request),
            }
        }
        self.bytes.push(0);
        server.fresh.iter().for_each(|&request| self.request(1, request));
        self.bytes.push(0);
        for order in &server.orders {
            match *order {
                Order::LiveNow(count) => self.bytes.extend([1, count as u8]),
                Order::Enqueue(request) => self.request(2, request),
                Order::Release(request) => self.request(3, request),
            }
        }
        for frames in &server.frames {
            self.bytes.push(0);
            frames.iter().for_each(|frame| self.frame(frame));
        }
    }

    fn frame(&mut self, frame: &Frame) {
        match frame {
            Frame::Live(notes) => {
                self.bytes.push(1);
                self.notes(notes);
            }
            Frame::Request(request, notes) => {
                self.request(2, *request);
                self.notes(notes);
            }
            Frame::Emit(request) => self.request(3, *request),
            Frame::Release(request) => self.request(4, *request),
        }
    }

    fn request(&mut self, what: u8, request: u8) {
        self.bytes.extend([what, self.names[usize::from(request)]]);
    }

    fn notes(&mut self, notes: &LiveNotes) {
        for (note, stamps) in notes.iter().zip(&self.stamps) {
            let rank = stamps.binary_search(&note.stamp.seq).expect("every stamp was collected");
            self.bytes.extend([rank as u8, note.count as u8]);
        }
    }
}

fn spot_byte(spot: Spot) -> u8 {
    match spot {
        Spot::Nowhere => 0,
        Spot::Moving => 1,
        Spot::Waiting(model) => 2 + 2 * model,
        Spot::Running(model) => 3 + 2 * model,
    }
}

/// Any numbering gives an equal state, because requests differ in nothing but what they do.
fn names(state: &State) -> Vec<u8> {
    let is_over = |at: usize| state.spots[at] == Spot::Nowhere && !state.is_open(at as u8);
    let key = |&at: &usize| {
        let ended: Vec<u8> = state.servers.iter().flat_map(|server| server.ended.map(|bits| bits >> at & 1)).collect();
        (state.homes[at], spot_byte(state.spots[at]), state.is_open(at as u8), ended)
    };
    let mut order: Vec<usize> = (0..state.spots.len()).filter(|&at| !is_over(at)).collect();
    order.sort_by_key(key);
    let mut names = vec![OVER; state.spots.len()];
    (0u8..).zip(order).for_each(|(new, old)| names[old] = new);
    names
}

fn stamps(state: &State) -> Vec<Vec<u64>> {
    let mut stamps = vec![Vec::new(); state.servers.len()];
    let mut collect = |notes: &LiveNotes| {
        notes.iter().zip(&mut stamps).for_each(|(note, stamps)| stamps.push(note.stamp.seq));
    };
    for server in &state.servers {
        collect(&server.table.notes());
        for frame in server.frames.iter().flatten() {
            if let Frame::Live(notes) | Frame::Request(_, notes) = frame {
                collect(notes);
            }
        }
    }
    for stamps in &mut stamps {
        stamps.sort_unstable();
        stamps.dedup();
    }
    stamps
}

impl State {
    fn start(bounds: &Bounds) -> Self {
        let server = |model: usize| Subserver {
            table: LiveTable::new(ModelIdx(model as u8), bounds.models, 1),
            live: 0,
            ended: [0; 2],
            words: VecDeque::new(),
            fresh: VecDeque::new(),
            orders: VecDeque::new(),
            frames: vec![VecDeque::new(); bounds.models],
        };
        State {
            servers: (0..bounds.models).map(server).collect(),
            spots: Vec::new(),
            homes: Vec::new(),
            open: 0,
            aborts: bounds.aborts,
        }
    }

    /// A number for this state; two different states share one only if a 128-bit hash does.
    fn print(&self) -> u128 {
        let text = Text::of(self);
        let half = |salt: u64| {
            let mut hasher = DefaultHasher::new();
            hasher.write_u64(salt);
            hasher.write(&text);
            hasher.finish()
        };
        u128::from(half(1)) << 64 | u128::from(half(2))
    }

    /// Delivers what changes nothing now and never would: notes that are late, the end of a request that is over. When
    /// such a message arrives makes no difference, so one order of them stands for all.
    fn settle(&mut self, bounds: &Bounds) {
        while let Some(act) = self.idle_act() {
            self.act(act, bounds);
        }
    }

    fn idle_act(&self) -> Option<Act> {
        let is_over = |request: u8| self.spots[usize::from(request)] == Spot::Nowhere;
        for (model, server) in self.servers.iter().enumerate() {
            let is_idle = match server.orders.front() {
                Some(Order::LiveNow(live)) => *live == server.live,
                Some(Order::Release(request)) => is_over(*request),
                Some(Order::Enqueue(_)) | None => false,
            };
            if is_idle {
                return Some(Act::Order { model });
            }
            for (to, frames) in server.frames.iter().enumerate() {
                let is_idle = match frames.front() {
                    Some(Frame::Live(notes)) => !self.servers[to].table.clone().absorb(ModelIdx(model as u8), notes),
                    Some(Frame::Emit(request)) => !self.is_open(*request),
                    Some(Frame::Release(request)) => is_over(*request),
                    Some(Frame::Request(..)) | None => false,
                };
                if is_idle {
                    return Some(Act::Frame { from: model, to });
                }
            }
        }
        None
    }

    fn acts(&self, bounds: &Bounds) -> Vec<Act> {
        let mut acts = Vec::new();
        if self.spots.len() < usize::from(bounds.requests) {
            acts.extend((0..bounds.homes).map(|home| Act::Arrive { home }));
        }
        for (request, spot) in (0u8..).zip(&self.spots) {
            if self.aborts > 0 && self.is_open(request) {
                acts.push(Act::Abort { request });
            }
            if let Spot::Running(_) = spot {
                acts.extend((0..bounds.models as u8).map(|to| Act::Step { request, to: Some(to) }));
                acts.push(Act::Step { request, to: None });
            }
        }
        for (model, server) in self.servers.iter().enumerate() {
            acts.extend((!server.words.is_empty()).then_some(Act::Word { model }));
            acts.extend((!server.fresh.is_empty()).then_some(Act::Fresh { model }));
            acts.extend((!server.orders.is_empty()).then_some(Act::Order { model }));
            let frames = server.frames.iter().enumerate().filter(|(_, frames)| !frames.is_empty());
            acts.extend(frames.map(|(to, _)| Act::Frame { from: model, to }));
        }
        acts
    }

    fn is_open(&self, request: u8) -> bool {
        self.open & (1 << request) != 0
    }

    fn act(&mut self, act: Act, bounds: &Bounds) {
        match act {
            Act::Arrive { home } => {
                let request = self.spots.len() as u8;
                self.spots.push(Spot::Moving);
                self.homes.push(home);
                self.open |= 1 << request;
                self.count_live(home, bounds);
                self.servers[usize::from(home)].fresh.push_back(request);
            }
            Act::Abort { request } => {
                // As many as there are requests is as many as one likes.
                self.aborts -= u8::from(bounds.aborts < bounds.requests);
                self.end(request, bounds);
            }
            Act::Word { model } => {
                let word = self.servers[model].words.pop_front().expect("a word");
                self.hear(model, word, bounds);
            }
            Act::Fresh { model } => {
                let request = self.servers[model].fresh.pop_front().expect("a request");
                self.obey(model, Order::Enqueue(request), bounds);
            }
            Act::Order { model } => {
                let order = self.servers[model].orders.pop_front().expect("an order");
                self.obey(model, order, bounds);
            }
            Act::Frame { from, to } => {
                let frame = self.servers[from].frames[to].pop_front().expect("a frame");
                self.arrive(from, to, frame, bounds);
            }
            Act::Step { request, to } => self.step(request, to, bounds),
        }
    }

    /// The Client says how many are live.
    fn count_live(&mut self, home: u8, bounds: &Bounds) {
        let mine = (0u8..).zip(&self.homes).filter(|&(request, &of)| of == home && self.is_open(request));
        let count = mine.count() as u32;
        self.say(usize::from(home), Word::OwnLive(count), bounds);
    }

    /// The Client closes a stream.
    fn end(&mut self, request: u8, bounds: &Bounds) {
        if !self.is_open(request) {
            return;
        }
        self.open &= !(1 << request);
        let home = self.homes[usize::from(request)];
        self.say(usize::from(home), Word::Release(request), bounds);
        self.count_live(home, bounds);
    }

    fn say(&mut self, model: usize, word: Word, bounds: &Bounds) {
        match bounds.inside {
            true => self.servers[model].words.push_back(word),
            false => self.hear(model, word, bounds),
        }
    }

    fn order(&mut self, model: usize, order: Order, bounds: &Bounds) {
        match bounds.inside {
            true => self.servers[model].orders.push_back(order),
            false => self.obey(model, order, bounds),
        }
    }

    fn broadcast(&mut self, model: usize, frame: &Frame) {
        let server = &mut self.servers[model];
        let peers = server.frames.iter_mut().enumerate().filter(|(to, _)| *to != model);
        peers.for_each(|(_, frames)| frames.push_back(frame.clone()));
    }

    /// InterModel hears its Client.
    fn hear(&mut self, model: usize, word: Word, bounds: &Bounds) {
        match word {
            Word::OwnLive(count) => {
                let table = &mut self.servers[model].table;
                table.set_own(count);
                let (total, notes) = (table.total(), table.notes());
                self.order(model, Order::LiveNow(total), bounds);
                if !bounds.silent {
                    self.broadcast(model, &Frame::Live(notes));
                }
            }
            Word::Release(request) => {
                self.release(model, request, bounds);
                self.broadcast(model, &Frame::Release(request));
            }
        }
    }

    fn release(&mut self, model: usize, request: u8, bounds: &Bounds) {
        self.servers[model].ended[0] |= 1 << request;
        self.order(model, Order::Release(request), bounds);
    }

    /// InterModel hears a peer.
    fn arrive(&mut self, from: usize, to: usize, frame: Frame, bounds: &Bounds) {
        match frame {
            Frame::Live(notes) => self.absorb(from, to, &notes, bounds),
            Frame::Emit(request) => self.end(request, bounds),
            Frame::Release(request) => self.release(to, request, bounds),
            Frame::Request(request, notes) => {
                self.absorb(from, to, &notes, bounds);
                if self.servers[to].ended[0] & (1 << request) != 0 {
                    self.spots[usize::from(request)] = Spot::Nowhere;
                    self.servers[to].frames[from].push_back(Frame::Release(request));
                } else {
                    self.order(to, Order::Enqueue(request), bounds);
                }
            }
        }
    }

    fn absorb(&mut self, from: usize, to: usize, notes: &LiveNotes, bounds: &Bounds) {
        if self.servers[to].table.absorb(ModelIdx(from as u8), notes) {
            let total = self.servers[to].table.total();
            self.order(to, Order::LiveNow(total), bounds);
        }
    }

    /// Decode and Batcher.
    fn obey(&mut self, model: usize, order: Order, bounds: &Bounds) {
        match order {
            Order::LiveNow(live) => self.servers[model].live = live,
            Order::Enqueue(request) => {
                // One that has ended already is dropped when the batch begins, at once or later.
                self.spots[usize::from(request)] = Spot::Waiting(model as u8);
            }
            Order::Release(request) => {
                self.servers[model].ended[1] |= 1 << request;
                let spot = &mut self.spots[usize::from(request)];
                if *spot == Spot::Waiting(model as u8) {
                    *spot = Spot::Nowhere;
                }
            }
        }
        self.pump(model, bounds);
    }

    fn gate(&self, model: usize, bounds: &Bounds) -> Gate<Guest> {
        let policy = bounds.thresholds.build(bounds.models);
        let mut gate = Gate::new(ModelIdx(model as u8), policy, Duration::MAX);
        gate.set_live(self.servers[model].live);
        for (request, spot) in (0u8..).zip(&self.spots) {
            if *spot == Spot::Waiting(model as u8) {
                gate.push(Guest(request));
            }
        }
        gate
    }

    fn pump(&mut self, model: usize, bounds: &Bounds) {
        let (waiting, running) = (Spot::Waiting(model as u8), Spot::Running(model as u8));
        while !self.spots.contains(&running) && self.spots.contains(&waiting) {
            let Verdict::Go(batch, _) = self.gate(model, bounds).poll(Time(0), 8) else { return };
            for Guest(request) in batch {
                let gone = self.servers[model].ended[1] & (1 << request) != 0;
                self.spots[usize::from(request)] = if gone { Spot::Nowhere } else { running };
            }
        }
    }

    /// The step of a request is over; that of its batch when none of it runs any more.
    fn step(&mut self, request: u8, to: Option<u8>, bounds: &Bounds) {
        let at = usize::from(request);
        let Spot::Running(model) = self.spots[at] else { unreachable!("it runs") };
        let (me, home) = (usize::from(model), usize::from(self.homes[at]));
        let gone = self.servers[me].ended[1] & (1 << request) != 0;
        match to {
            _ if gone => self.spots[at] = Spot::Nowhere,
            Some(to) if to == model => self.spots[at] = Spot::Waiting(model),
            Some(_) if self.servers[me].ended[0] & (1 << request) != 0 => self.spots[at] = Spot::Nowhere,
            Some(to) => {
                self.spots[at] = Spot::Moving;
                let notes = self.servers[me].table.notes();
                self.servers[me].frames[usize::from(to)].push_back(Frame::Request(request, notes));
            }
            None => {
                self.spots[at] = Spot::Nowhere;
                match home == me {
                    true => self.end(request, bounds),
                    false => self.servers[me].frames[home].push_back(Frame::Emit(request)),
                }
            }
        }
        self.pump(me, bounds);
    }

    /// Nothing runs and nothing is on its way.
    fn is_still(&self) -> bool {
        let runs = self.spots.iter().any(|spot| matches!(spot, Spot::Running(_)));
        let queues = |server: &Subserver| {
            server.words.is_empty()
                && server.fresh.is_empty()
                && server.orders.is_empty()
                && server.frames.iter().all(VecDeque::is_empty)
        };
        !runs && self.servers.iter().all(queues)
    }

    /// What must hold in every state.
    fn check(&self) -> Result<(), String> {
        if !self.is_still() {
            return Ok(());
        }
        let live = self.open.count_ones();
        for (model, server) in self.servers.iter().enumerate() {
            if (server.live, server.table.total()) != (live, live) {
                return Err(format!("model {model} believes in {} of {live} live", server.live));
            }
        }
        match self.spots.iter().find(|spot| **spot != Spot::Nowhere) {
            Some(spot) => Err(format!("{spot:?} for ever")),
            None if live > 0 => Err("a request is live and nowhere".into()),
            None => Ok(()),
        }
    }
}

/// Thresholds follow the live count at once, and leave some model with enough of them wherever they wait.
fn check_thresholds(bounds: &Bounds) {
    for live in 0..=u32::from(bounds.requests) {
        let clamped = clamp(bounds.thresholds.build(bounds.models).thresholds(live), live);
        assert!(clamped.iter().map(|b| b - 1).sum::<u32>() < live.max(1), "{clamped:?} at {live} live");
        for (model, &threshold) in clamped.iter().enumerate() {
            let mut gate = State::start(bounds).gate(model, bounds);
            gate.set_live(live);
            assert_eq!(gate.threshold(), threshold, "model {model} at {live} live");
        }
    }
}

/// Explores everything that can be reached; returns how many states there are and in how many of them nothing moves.
fn explore(bounds: &Bounds) -> Result<(usize, usize), String> {
    check_thresholds(bounds);
    let start = State::start(bounds);
    let mut seen = HashSet::from([start.print()]);
    let mut still = 0;
    let mut todo = vec![start];
    while let Some(state) = todo.pop() {
        still += usize::from(state.is_still());
        state.check().map_err(|fault| format!("{fault} in {state:#?}\nof {bounds:?}"))?;
        for act in state.acts(bounds) {
            let mut next = state.clone();
            next.act(act, bounds);
            next.settle(bounds);
            if seen.insert(next.print()) {
                todo.push(next);
            }
        }
    }
    Ok((seen.len(), still))
}

/// Everything delayed and everything allowed, between subservers.
fn bounds(models: usize, requests: u8, thresholds: Thresholds) -> Bounds {
    let homes = models as u8;
    Bounds { models, requests, thresholds, inside: false, homes, aborts: requests, silent: false }
}

/// Explores one thing after the other; every number of states is known.
fn check(explored: &[(Bounds, usize)]) {
    let mut wrong = Vec::new();
    for (bounds, expected) in explored {
        let begin = std::time::Instant::now();
        let (states, still) = explore(bounds).unwrap_or_else(|fault| panic!("{fault}"));
        println!("{states} states, {still} of them still, in {:.1?}: {bounds:?}", begin.elapsed());
        if states != *expected {
            wrong.push((states, expected, bounds));
        }
    }
    assert!(wrong.is_empty(), "other numbers of states than expected: {wrong:#?}");
}

const SWINGING: Thresholds = Thresholds::Swinging;
const TWO_HIGH: Thresholds = Thresholds::Fixed(&[4, 4]);
const HIGH: Thresholds = Thresholds::Fixed(&[4, 4, 4]);
const MIXED: Thresholds = Thresholds::Fixed(&[2, 2, 2]);

#[test]
fn two_models_never_wait_for_each_other() {
    check(&[
        (Bounds { inside: true, ..bounds(1, 4, Thresholds::Fixed(&[4])) }, 288_352),
        (Bounds { inside: true, homes: 1, ..bounds(2, 2, TWO_HIGH) }, 201_582),
        (bounds(2, 3, SWINGING), 488_980),
        (Bounds { homes: 1, ..bounds(2, 4, SWINGING) }, 1_116_278),
    ]);
}

#[test]
fn three_models_never_wait_for_each_other() {
    check(&[(bounds(3, 2, HIGH), 646_397), (Bounds { homes: 1, aborts: 0, ..bounds(3, 4, SWINGING) }, 351_690)]);
}

#[test]
fn more_of_the_same() {
    if std::env::var_os("MODEL_CHECK").is_none_or(|size| size != "large") {
        return;
    }
    for bounds in [
        Bounds { homes: 1, aborts: 0, ..bounds(3, 4, MIXED) },
        Bounds { homes: 1, aborts: 1, ..bounds(3, 4, SWINGING) },
        Bounds { homes: 1, ..bounds(3, 3, SWINGING) },
        Bounds { inside: true, ..bounds(2, 2, TWO_HIGH) },
        bounds(2, 4, SWINGING),
    ] {
        let found = explore(&bounds).unwrap_or_else(|fault| panic!("{fault}"));
        println!("{found:?}: {bounds:?}");
    }
}

/// Without the live counts of others, thresholds are wrong or the counts are: the explorer sees it.
#[test]
fn a_model_that_keeps_its_count_to_itself_is_found_out() {
    let fault = explore(&Bounds { silent: true, ..bounds(2, 2, SWINGING) }).expect_err("it is found");
    assert!(fault.contains("believes in") || fault.contains("for ever"), "{fault}");
}
