//! What became of the latest requests: where each waited, ran and was pending, put together from the journals of all models.
//! Owner: whoever asks. Invariant: bounded in requests and in spans of each; a journal that comes late adds what it says.

use super::ms;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use tokenrouter_actors::journal::{Entry, What};
use tokenrouter_core::ids::{ModelIdx, RequestId, Time};

/// Requests that are kept; live ones are kept longer than those that have ended.
const KEPT: usize = 100;
/// Requests that are told, and spans of all of them together.
const TOLD: usize = 50;
const SPANS_TOLD: usize = 3000;
/// Spans of one request; the oldest are forgotten.
const SPANS: usize = 400;
/// A wait between two steps that is shorter than this, or than a tenth of a step, is part of the steps.
const WAIT_NANOS: u64 = 200_000;

/// The latest requests.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Requests {
    /// Milliseconds since the server started.
    now_ms: f64,
    /// Newest first.
    requests: Vec<Told>,
}

/// One request.
#[derive(Clone, Debug, Serialize, JsonSchema)]
struct Told {
    /// Its id in the log.
    id: String,
    /// Whether it is routed; otherwise one model was asked for.
    routed: bool,
    /// The model where it entered.
    entry: String,
    /// Milliseconds since the server started.
    arrived_ms: f64,
    /// Null while it is live.
    ended_ms: Option<f64>,
    /// `stop`, `length`, `abort` or `error`; null while it is live.
    outcome: Option<&'static str>,
    /// Tokens of its prompt.
    prompt_tokens: u32,
    /// Tokens committed.
    tokens: u32,
    /// The same by model.
    by_model: BTreeMap<String, u32>,
    /// Where it was, in the order of beginning.
    spans: Vec<ToldSpan>,
}

/// A time at one model.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
struct ToldSpan {
    /// The model.
    model: String,
    /// What it did there.
    kind: Kind,
    /// Milliseconds since the server started.
    from_ms: f64,
    /// Null while it goes on.
    to_ms: Option<f64>,
    /// Steps of a running request.
    steps: u32,
}

/// What a request does at a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Kind {
    /// Waits for a batch.
    Waiting,
    /// Is part of one step after the other.
    Running,
    /// Its KV is kept while another model has control.
    Pending,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    model: usize,
    kind: Kind,
    from: Time,
    to: Option<Time>,
    steps: u32,
}

#[derive(Clone, Debug, Default)]
struct Record {
    is_routed: bool,
    entry: Option<usize>,
    arrived: Time,
    ended: Option<(Time, &'static str)>,
    prompt_tokens: u32,
    committed: BTreeMap<usize, u32>,
    spans: VecDeque<Span>,
    /// The model that control went to last, and when, until a step of it there is over.
    awaits: Option<(usize, Time)>,
    /// End of the latest step that is known.
    latest: Time,
}

impl Record {
    fn push(&mut self, span: Span) {
        if self.spans.len() == SPANS {
            self.spans.pop_front();
        }
        self.spans.push_back(span);
    }

    fn last_at(&mut self, model: usize) -> Option<&mut Span> {
        self.spans.iter_mut().rev().find(|span| span.model == model)
    }

    fn stepped(&mut self, model: usize, at: Time, step: Stepped) {
        let Stepped { since, began, to } = step;
        let short = WAIT_NANOS.max(at.0.saturating_sub(began.0) / 10);
        let is_short = |from: Time| began.0.saturating_sub(from.0) < short;
        let mut goes_on = false;
        if let Some(last) = self.last_at(model) {
            if last.kind == Kind::Pending && last.to.is_none_or(|to| to > since) {
                last.to = Some(since);
            }
            if last.kind == Kind::Running && last.to.is_some_and(is_short) {
                (last.to, goes_on) = (Some(at), true);
                last.steps += 1;
            }
        }
        if !goes_on {
            if !is_short(since) {
                self.push(Span { model, kind: Kind::Waiting, from: since, to: Some(began), steps: 0 });
            }
            self.push(Span { model, kind: Kind::Running, from: began, to: Some(at), steps: 1 });
        }
        if let Some(to) = to.map(ModelIdx::index).filter(|to| *to != model) {
            self.is_routed = true;
            let ended = self.ended.map(|(ended, _)| ended.max(at));
            self.push(Span { model, kind: Kind::Pending, from: at, to: ended, steps: 0 });
            if at >= self.latest {
                self.awaits = Some((to, at));
            }
        } else if at >= self.latest {
            self.awaits = None;
        }
        self.latest = self.latest.max(at);
    }

    /// Where a live request has come and no step of it has ended: it is taken to wait.
    fn awaited(&self) -> Option<Span> {
        let (model, from) = self.awaits.filter(|_| self.ended.is_none())?;
        Some(Span { model, kind: Kind::Waiting, from, to: None, steps: 0 })
    }

    fn end(&mut self, at: Time, outcome: &'static str) {
        self.ended = Some((at, outcome));
        for span in self.spans.iter_mut().filter(|span| span.to.is_none()) {
            span.to = Some(at.max(span.from));
        }
    }
}

/// A step of a request.
struct Stepped {
    since: Time,
    began: Time,
    to: Option<ModelIdx>,
}

/// Puts journals together.
#[derive(Debug, Default)]
pub struct Timeline(BTreeMap<RequestId, Record>);

impl Timeline {
    /// What happened since the last time, by model.
    pub fn absorb(&mut self, journals: Vec<VecDeque<Entry>>) {
        let tagged = |(model, journal): (usize, VecDeque<Entry>)| journal.into_iter().map(move |entry| (model, entry));
        let mut all: Vec<(usize, Entry)> = journals.into_iter().enumerate().flat_map(tagged).collect();
        all.sort_by_key(|(_, entry)| entry.at);
        for (model, entry) in all {
            self.take(model, entry);
        }
        while self.0.len() > KEPT {
            let ended = self.0.iter().find(|(_, record)| record.ended.is_some()).map(|(id, _)| *id);
            match ended.or_else(|| self.0.keys().next().copied()) {
                Some(id) => self.0.remove(&id),
                None => break,
            };
        }
    }

    fn take(&mut self, model: usize, Entry { request, at, what }: Entry) {
        let unknown = || Record { arrived: at, ..Record::default() };
        let record = self.0.entry(request).or_insert_with(unknown);
        match what {
            What::Arrived { is_routed, prompt_tokens } => {
                (record.is_routed, record.entry, record.arrived) = (is_routed, Some(model), at);
                record.prompt_tokens = prompt_tokens;
                record.awaits = record.awaits.or_else(|| record.spans.is_empty().then_some((model, at)));
            }
            What::Stepped { since, began, committed, to } => {
                *record.committed.entry(model).or_default() += u32::from(committed);
                record.stepped(model, at, Stepped { since, began, to });
            }
            What::Ended(ending) => record.end(at, ending.name()),
        }
    }

    /// The latest requests.
    pub fn tell(&self, names: &[&str], now: Time) -> Requests {
        let mut room = SPANS_TOLD;
        let newest = self.0.iter().rev().take(TOLD);
        let requests = newest.map(|(id, record)| {
            let spans = record.spans.len().min(room);
            room -= spans;
            told(*id, record, (names, spans))
        });
        Requests { now_ms: ms(now), requests: requests.collect() }
    }
}

fn told(id: RequestId, record: &Record, (names, spans): (&[&str], usize)) -> Told {
    let name = |model: usize| names.get(model).copied().unwrap_or_default().to_owned();
    let mut last: Vec<Span> = record.spans.iter().skip(record.spans.len() - spans).copied().collect();
    last.extend(record.awaited());
    last.sort_by_key(|span| span.from);
    let span = |span: Span| ToldSpan {
        model: name(span.model),
        kind: span.kind,
        from_ms: ms(span.from),
        to_ms: span.to.map(ms),
        steps: span.steps,
    };
    Told {
        id: id.to_string(),
        routed: record.is_routed,
        entry: record.entry.map(name).unwrap_or_default(),
        arrived_ms: ms(record.arrived),
        ended_ms: record.ended.map(|(at, _)| ms(at)),
        outcome: record.ended.map(|(_, outcome)| outcome),
        prompt_tokens: record.prompt_tokens,
        tokens: record.committed.values().sum(),
        by_model: record.committed.iter().map(|(model, tokens)| (name(*model), *tokens)).collect(),
        spans: last.into_iter().map(span).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenrouter_actors::journal::Ending;

    const MS: u64 = 1_000_000;
    const NAMES: [&str; 2] = ["small", "large"];

    fn at(ms: u64) -> Time {
        Time(ms * MS)
    }

    fn arrived(id: u64, when: u64) -> Entry {
        let what = What::Arrived { is_routed: true, prompt_tokens: 7 };
        Entry { request: RequestId(id), at: at(when), what }
    }

    /// Waited since, began, ended; goes on there.
    fn step(id: u64, (since, began, ended): (u64, u64, u64), to: Option<u8>) -> Entry {
        let what = What::Stepped { since: at(since), began: at(began), committed: to != Some(1), to: to.map(ModelIdx) };
        Entry { request: RequestId(id), at: at(ended), what }
    }

    fn ended(id: u64, when: u64) -> Entry {
        Entry { request: RequestId(id), at: at(when), what: What::Ended(Ending::Stop) }
    }

    fn spans(timeline: &Timeline, now: u64) -> Vec<(String, Kind, f64, Option<f64>, u32)> {
        let told = timeline.tell(&NAMES, at(now));
        let of = |span: &ToldSpan| (span.model.clone(), span.kind, span.from_ms, span.to_ms, span.steps);
        told.requests[0].spans.iter().map(of).collect()
    }

    /// Small writes two tokens, gives control away, waits at large for a batch, comes back and ends.
    #[test]
    fn a_request_is_followed_from_model_to_model() {
        let small = [
            arrived(5, 0),
            step(5, (0, 0, 10), Some(0)),
            step(5, (10, 10, 20), Some(0)),
            step(5, (20, 20, 30), Some(1)),
        ];
        let back = [step(5, (60, 60, 70), None), ended(5, 71)];
        let large = [step(5, (31, 40, 60), Some(0))];
        let mut timeline = Timeline::default();
        timeline.absorb(vec![VecDeque::from([arrived(5, 0)]), VecDeque::new()]);
        assert_eq!(spans(&timeline, 1), [("small".to_owned(), Kind::Waiting, 0.0, None, 0)], "before its first step");
        timeline.absorb(vec![small.into(), VecDeque::new()]);
        let small = |kind, from, to, steps| ("small".to_owned(), kind, from, to, steps);
        let large_at = |kind, from, to, steps| ("large".to_owned(), kind, from, to, steps);
        let begin = [
            small(Kind::Running, 0.0, Some(30.0), 3),
            small(Kind::Pending, 30.0, None, 0),
            large_at(Kind::Waiting, 30.0, None, 0),
        ];
        assert_eq!(spans(&timeline, 35), begin, "while it is away");
        // What came first is told last.
        timeline.absorb(vec![back.into(), VecDeque::new()]);
        timeline.absorb(vec![VecDeque::new(), large.into()]);
        let whole = [
            small(Kind::Running, 0.0, Some(30.0), 3),
            small(Kind::Pending, 30.0, Some(60.0), 0),
            large_at(Kind::Waiting, 31.0, Some(40.0), 0),
            large_at(Kind::Running, 40.0, Some(60.0), 1),
            small(Kind::Running, 60.0, Some(70.0), 1),
            large_at(Kind::Pending, 60.0, Some(71.0), 0),
        ];
        assert_eq!(spans(&timeline, 80), whole);
        let told = &timeline.tell(&NAMES, at(80)).requests[0];
        assert_eq!((told.outcome, told.ended_ms, told.arrived_ms), (Some("stop"), Some(71.0), 0.0));
        assert_eq!((told.tokens, told.prompt_tokens, told.entry.as_str()), (4, 7, "small"));
        assert_eq!(told.by_model, BTreeMap::from([("small".to_owned(), 3), ("large".to_owned(), 1)]));
    }

    #[test]
    fn what_is_kept_and_told_is_bounded_and_live_requests_stay() {
        let mut timeline = Timeline::default();
        let many = (1..=2 * KEPT as u64).flat_map(|id| [arrived(id, id), ended(id, id + 1)]);
        let long = (0..2 * SPANS as u64).map(|n| step(0, (10 * n, 10 * n + 5, 10 * n + 9), Some(0)));
        timeline.absorb(vec![std::iter::once(arrived(0, 0)).chain(many).chain(long).collect()]);
        assert_eq!(timeline.0.len(), KEPT);
        assert_eq!(timeline.0[&RequestId(0)].spans.len(), SPANS, "live, and the oldest of all");
        assert_eq!(timeline.tell(&NAMES, at(0)).requests.len(), TOLD);
        let long = |id: u64| (0..SPANS as u64).map(move |n| step(id, (10 * n, 10 * n + 5, 10 * n + 9), Some(0)));
        timeline.absorb(vec![(1000..1050).flat_map(long).collect()]);
        let told = timeline.tell(&NAMES, at(0));
        assert_eq!(told.requests.iter().map(|request| request.spans.len()).sum::<usize>(), SPANS_TOLD);
        assert_eq!(told.requests[0].spans.len(), SPANS, "the newest are told whole");
    }
}
