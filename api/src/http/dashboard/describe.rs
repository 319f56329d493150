//! Makes the document of `GET /actors` of what the engine and its meters say. Owner: the HTTP layer. Invariant: pure but for
//! the meters of the HTTP side, which it reads.

use super::ms;
use super::state::{
    ActorState, BatchingState, Durations, HopState, KvState, LogState, MailboxState, ModelState, PlannerState,
    Prediction, RequestCounts, RouterState, ServedState, State, StepState, TokenCounts,
};
use crate::http::App;
use crate::http::latency::Latency;
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokenrouter_actors::board::{BatcherSnapshot, Role};
use tokenrouter_actors::histogram::Counts;
use tokenrouter_actors::mailbox::MailboxSnapshot;
use tokenrouter_actors::runtime::{ModelSnapshot, RuntimeSnapshot};
use tokenrouter_core::executor::PAGE_TOKENS;

fn json(value: &impl Serialize) -> Value {
    serde_json::to_value(value).unwrap_or_else(|error| Value::String(error.to_string()))
}

impl State {
    /// As a snapshot says, with what the throughput model said last.
    pub fn new(app: &App, snapshot: &RuntimeSnapshot, prediction: Option<Prediction>) -> State {
        let names: Vec<&str> = snapshot.models.iter().map(|model| model.name.as_str()).collect();
        State {
            now_ms: ms(snapshot.now),
            open: snapshot.open,
            live: snapshot.live,
            live_prompt_tokens: snapshot.prompt_tokens,
            live_max: snapshot.settings.live_max,
            router: RouterState {
                name: app.served.first().map(|served| served.id.clone()).unwrap_or_default(),
                algorithm: app.router.active.clone(),
                policy: snapshot.settings.policy,
                execution: json(&snapshot.settings.execution),
            },
            models: (0..names.len()).map(|index| model(snapshot, &names, index)).collect(),
            conductor: snapshot.conductor.as_ref().map(mailbox_state),
            planner: snapshot.planner.as_ref().map(|said| PlannerState {
                looks: said.looks,
                planned: said.planned,
                adopted: said.adopted,
                failed: said.failed,
                gain: said.gain,
                last_error: said.last_error.clone(),
            }),
            prediction,
            latency: app
                .served
                .iter()
                .filter_map(|one| Some(served(&one.id, app.metrics.latencies().find(&one.id)?)))
                .collect(),
            log: log(snapshot),
        }
    }
}

fn model(snapshot: &RuntimeSnapshot, names: &[&str], index: usize) -> ModelState {
    let model = &snapshot.models[index];
    let (batcher, decode, kv) = (&model.batcher, &model.decode, &model.kv);
    let mut time = Counts::default();
    model.instruments.step_time.iter().for_each(|counts| time.add(counts));
    ModelState {
        name: model.name.clone(),
        elsewhere: model.elsewhere.clone(),
        requests: RequestCounts {
            open_streams: model.client.live,
            waiting: batcher.waiting,
            stalled: batcher.stalled,
            running: decode.running,
            pending: model.inter_model.pending,
        },
        tokens: TokenCounts {
            committed: decode.committed,
            dropped: decode.dropped,
            decode: decode.decode_tokens,
            extend: decode.extend_tokens,
        },
        steps: StepState {
            count: decode.steps,
            failed: decode.steps_failed,
            busy_seconds: decode.busy.as_secs_f64(),
            sizes: model.instruments.batch_sizes.clone(),
            time: (&time).into(),
        },
        batching: batching(snapshot, batcher, &model.instruments.batch_wait),
        hops: names.iter().enumerate().map(|(to, name)| hop(snapshot, (index, to), name)).collect(),
        kv: KvState {
            pages_total: kv.pages_total,
            pages_used: kv.pages_total.saturating_sub(kv.pages_free + kv.pages_cached),
            pages_cached: kv.pages_cached,
            page_tokens: PAGE_TOKENS,
            prefix_query_tokens: kv.prefix_query_tokens,
            prefix_hit_tokens: kv.prefix_hit_tokens,
            preemptions: kv.preemptions,
        },
        actors: Role::OF_A_MODEL.into_iter().enumerate().map(|(at, role)| actor(model, at, role)).collect(),
    }
}

fn batching(snapshot: &RuntimeSnapshot, batcher: &BatcherSnapshot, wait: &Counts) -> BatchingState {
    let (threshold, live) = (batcher.threshold, batcher.live);
    let chosen = match snapshot.settings.policy {
        "eager" => "eager: a step starts as soon as a request waits".to_owned(),
        "fixed" => format!("fixed by the launch file, as far as {live} live requests allow"),
        "optimal" => format!("planned at the launch for {live} live requests"),
        "adaptive" => format!("planned from what the models do, for {live} live requests"),
        _ => String::new(),
    };
    let effect = if threshold > 1 { format!("; a step waits for {threshold}") } else { String::new() };
    BatchingState {
        threshold,
        live,
        why: chosen + effect.as_str(),
        released: BatcherSnapshot::REASONS.into_iter().zip(batcher.released).collect(),
        rows: batcher.rows,
        waited_seconds: batcher.waited.as_secs_f64(),
        oldest_ms: batcher.oldest.map(|oldest| snapshot.now.since(oldest).as_secs_f64() * 1e3),
        wait: wait.into(),
    }
}

fn hop(snapshot: &RuntimeSnapshot, (from, to): (usize, usize), name: &str) -> HopState {
    let model = &snapshot.models[from];
    let learnt = |values: &[f64]| values.get(to).copied().unwrap_or(0.0);
    let arrived = snapshot.models[to].instruments.hop_latency.get(from).filter(|_| from != to);
    HopState {
        to: name.to_owned(),
        count: model.inter_model.hops.get(to).copied().unwrap_or(0),
        p: learnt(&model.decode.behaviour.moves),
        tokens: learnt(&model.decode.behaviour.tokens),
        latency: arrived.map_or_else(|| (&Counts::default()).into(), Durations::from),
    }
}

fn actor(model: &ModelSnapshot, at: usize, role: Role) -> ActorState {
    let mailbox = model.instruments.mailboxes.get(at).cloned().unwrap_or_default();
    let supervised = &model.subserver;
    let lives = match role {
        Role::Subserver | Role::Planner => 0,
        Role::Executor => supervised.executor_restarts + supervised.children_restarts,
        Role::Client | Role::Batcher | Role::Decode | Role::InterModel => supervised.children_restarts,
    };
    let is_stepping = model.decode.running > 0;
    let is_busy = mailbox.depth > 0 || is_stepping && matches!(role, Role::Decode | Role::Executor);
    let state = match role {
        _ if model.elsewhere.is_some() => "elsewhere",
        Role::Executor if model.decode.is_lost => "lost",
        _ if is_busy => "busy",
        _ => "idle",
    };
    let last_of = |role| model.instruments.log.iter().rev().find(|entry| entry.role == role);
    let snapshot = match role {
        Role::Subserver | Role::Planner => said(supervised),
        Role::Client => said(&model.client),
        Role::Batcher => said(&model.batcher),
        Role::Decode => said(&model.decode),
        Role::InterModel => said(&model.inter_model),
        Role::Executor => json(&executor(model)),
    };
    ActorState {
        role: role.name(),
        state,
        lives: lives + 1,
        last_error: last_of(role).map(|entry| entry.what.clone()),
        mailbox: mailbox_state(&mailbox),
        snapshot,
    }
}

fn mailbox_state(mailbox: &MailboxSnapshot) -> MailboxState {
    let MailboxSnapshot { depth, depth_max, messages, wait } = mailbox;
    MailboxState { depth: *depth, depth_max: *depth_max, messages: *messages, wait: wait.into() }
}

/// What an actor says of itself with its units in the names, and without what is long and told elsewhere.
fn said(snapshot: &impl Serialize) -> Value {
    let Value::Object(said) = json(snapshot) else { return Value::Null };
    let plain = |(name, value): (String, Value)| match (name.as_str(), &value) {
        ("totals", _) => None,
        ("began" | "last_step" | "oldest", Value::Number(nanos)) => {
            Some((name + "_ms", (nanos.as_f64().unwrap_or(0.0) / 1e6).into()))
        }
        (_, Value::Object(parts)) if parts.len() == 2 && parts.contains_key("secs") => {
            let part = |name: &str| parts.get(name).and_then(Value::as_f64).unwrap_or(0.0);
            Some((name + "_seconds", (part("secs") + part("nanos") / 1e9).into()))
        }
        _ => Some((name, value)),
    };
    Value::Object(said.into_iter().filter_map(plain).collect())
}

/// An executor says nothing of itself while it works: this is what is known of it.
fn executor(model: &ModelSnapshot) -> BTreeMap<&'static str, f64> {
    BTreeMap::from([
        ("holding_memory", f64::from(model.executors)),
        ("steps", model.decode.steps as f64),
        ("steps_failed", model.decode.steps_failed as f64),
        ("busy_seconds", model.decode.busy.as_secs_f64()),
        ("rows_in_flight", f64::from(model.decode.running)),
    ])
}

fn served(name: &str, latency: Arc<Latency>) -> ServedState {
    ServedState {
        model_name: name.to_owned(),
        ttft: (&latency.ttft.read()).into(),
        itl: (&latency.inter_token.read()).into(),
        e2e: (&latency.end_to_end.read()).into(),
        finished: latency.finished(),
        generation_tokens: latency.tokens(),
    }
}

fn log(snapshot: &RuntimeSnapshot) -> Vec<LogState> {
    let mut all: Vec<LogState> = Vec::new();
    for model in &snapshot.models {
        all.extend(model.instruments.log.iter().map(|entry| {
            let (model, actor, what) = (model.name.clone(), entry.role.name(), entry.what.clone());
            LogState { at_ms: ms(entry.at), model, actor, what }
        }));
    }
    all.sort_by(|a, b| a.at_ms.total_cmp(&b.at_ms));
    all
}
