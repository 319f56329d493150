//! What is measured of actors, steps and ways, as Prometheus series: mailboxes and histograms. Owner: the instruments of each
//! model; nothing is counted here. Invariant: every series of a model carries `model_name`, or both ends of a way.

use super::exposition::{Cumulative, Labels, Text};
use tokenrouter_actors::board::Role;
use tokenrouter_actors::histogram::Counts;
use tokenrouter_actors::instruments::{InstrumentsSnapshot, STEP_TOKENS, StepKind};
use tokenrouter_actors::mailbox::MailboxSnapshot;
use tokenrouter_actors::runtime::ModelSnapshot;

/// Bounds of histograms of batch sizes.
const BATCH_SIZES: [usize; 16] = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256];

/// One number of a mailbox: name, type, help, value.
type OfMailbox = (&'static str, &'static str, &'static str, fn(&MailboxSnapshot) -> u64);

const MAILBOXES: [OfMailbox; 3] = [
    ("tokenrouter:mailbox_depth", "gauge", "Messages that wait in the mailbox of an actor.", |m| m.depth),
    ("tokenrouter:mailbox_depth_max", "gauge", "Messages that ever waited at once.", |m| m.depth_max),
    ("tokenrouter:mailbox_messages_total", "counter", "Messages that an actor handled.", |m| m.messages),
];

/// One histogram of a model: name, help, counts.
type OfModel = (&'static str, &'static str, fn(&InstrumentsSnapshot) -> &Counts);

const BY_MODEL: [OfModel; 2] = [
    ("tokenrouter:batch_wait_seconds", "Time a request waited for a batch.", |i| &i.batch_wait),
    (
        "tokenrouter:router_decision_seconds",
        "Time from a drawn token to what follows from it, the routing decision included.",
        |i| &i.decision_time,
    ),
];

/// 16 µs to 67 s by doublings: what steps, batches and hops take.
fn fine() -> impl Iterator<Item = f64> {
    Counts::doublings().skip(4).take(23)
}

/// 1 µs to 67 s by fours: what messages wait.
fn coarse() -> impl Iterator<Item = f64> {
    Counts::doublings().step_by(2).take(14)
}

/// All of it.
pub fn render(out: &mut Text, models: &[ModelSnapshot]) {
    mailboxes(out, models);
    for (name, help, counts) in BY_MODEL {
        out.family(name, "histogram", help);
        for model in models {
            let counted = Cumulative::of(counts(&model.instruments), fine());
            out.histogram(name, &[("model_name", &model.name)], &counted);
        }
    }
    steps(out, models);
    let name = "tokenrouter:hop_latency_seconds";
    out.family(
        name,
        "histogram",
        "Time from leaving a model to waiting for a batch of the next; only inside one process.",
    );
    for (at, to) in models.iter().enumerate() {
        let others = models.iter().zip(&to.instruments.hop_latency).enumerate().filter(|(from, _)| *from != at);
        for (_, (from, counts)) in others {
            out.histogram(name, &[("from", &from.name), ("to", &to.name)], &Cumulative::of(counts, fine()));
        }
    }
}

fn mailboxes(out: &mut Text, models: &[ModelSnapshot]) {
    let each = |then: &mut dyn FnMut(Labels<'_>, &MailboxSnapshot)| {
        for model in models {
            for (role, mailbox) in Role::OF_A_MODEL.iter().zip(&model.instruments.mailboxes) {
                then(&[("actor", role.name()), ("model_name", &model.name)], mailbox);
            }
        }
    };
    for (name, kind, help, value) in MAILBOXES {
        out.family(name, kind, help);
        each(&mut |labels, mailbox| out.line(name, labels, value(mailbox) as f64));
    }
    let name = "tokenrouter:mailbox_wait_seconds";
    out.family(name, "histogram", "Time a message waited in the mailbox of an actor.");
    each(&mut |labels, mailbox| out.histogram(name, labels, &Cumulative::of(&mailbox.wait, coarse())));
}

/// Batches and forward passes.
fn steps(out: &mut Text, models: &[ModelSnapshot]) {
    let name = "tokenrouter:batch_size";
    out.family(name, "histogram", "Requests of a batch when it was released.");
    for model in models {
        out.histogram(name, &[("model_name", &model.name)], &batch_sizes(&model.instruments.batch_sizes));
    }
    let name = "vllm:iteration_tokens_total";
    out.family(name, "histogram", "Tokens that a forward pass consumed.");
    for model in models {
        let counts = &model.instruments.step_tokens;
        let mut counted = Cumulative { sum: counts[STEP_TOKENS.len() + 1] as f64, ..Cumulative::default() };
        for (bound, more) in STEP_TOKENS.iter().zip(counts) {
            counted.count += more;
            counted.buckets.push((*bound as f64, counted.count));
        }
        counted.count += counts[STEP_TOKENS.len()];
        out.histogram(name, &[("model_name", &model.name)], &counted);
    }
    let name = "tokenrouter:forward_seconds";
    out.family(name, "histogram", "Time of a forward pass, by what its rows consumed (prefill, extend, decode).");
    for model in models {
        for (kind, counts) in StepKind::ALL.iter().zip(&model.instruments.step_time) {
            let labels = [("kind", kind.name()), ("model_name", &model.name)];
            out.histogram(name, &labels, &Cumulative::of(counts, fine()));
        }
    }
}

fn batch_sizes(counts: &[u64]) -> Cumulative {
    let at_most = |bound: usize| counts.iter().take(bound).sum::<u64>();
    let sum: u64 = counts.iter().zip(1u64..).map(|(count, size)| count * size).sum();
    let buckets = BATCH_SIZES.iter().map(|&bound| (bound as f64, at_most(bound))).collect();
    Cumulative { buckets, count: counts.iter().sum(), sum: sum as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_come_from_the_instruments() {
        let model = |name: &str| ModelSnapshot { name: name.to_owned(), ..ModelSnapshot::default() };
        let mut models = [model("small"), model("large")];
        let instruments = &mut models[1].instruments;
        instruments.batch_sizes = vec![5, 0, 2];
        (instruments.step_tokens[0], instruments.step_tokens[2], instruments.step_tokens[13]) = (4, 2, 1);
        instruments.step_tokens[14] = 20_036;
        let waits = Counts { count: 6, sum_seconds: 90.0, buckets: vec![(3e-6, 4), (20e-6, 1), (f64::INFINITY, 1)] };
        instruments.hop_latency = vec![waits.clone(), Counts::default()];
        instruments.mailboxes = vec![MailboxSnapshot { depth: 3, depth_max: 7, messages: 6, wait: waits }];
        let mut text = Text::default();
        render(&mut text, &models);
        let text = text.finish();
        for line in [
            r#"tokenrouter:batch_size_bucket{model_name="large",le="2"} 5"#,
            r#"tokenrouter:batch_size_bucket{model_name="large",le="3"} 7"#,
            r#"tokenrouter:batch_size_sum{model_name="large"} 11"#,
            r#"vllm:iteration_tokens_total_bucket{engine="0",model_name="large",le="16"} 6"#,
            r#"vllm:iteration_tokens_total_bucket{engine="0",model_name="large",le="+Inf"} 7"#,
            r#"vllm:iteration_tokens_total_sum{engine="0",model_name="large"} 20036"#,
            r#"tokenrouter:mailbox_depth{actor="subserver",model_name="large"} 3"#,
            r#"tokenrouter:mailbox_wait_seconds_bucket{actor="subserver",model_name="large",le="0.000004"} 4"#,
            r#"tokenrouter:mailbox_wait_seconds_bucket{actor="subserver",model_name="large",le="67.108864"} 5"#,
            r#"tokenrouter:mailbox_wait_seconds_count{actor="subserver",model_name="large"} 6"#,
            r#"tokenrouter:hop_latency_seconds_bucket{from="small",to="large",le="0.000016"} 4"#,
            r#"tokenrouter:hop_latency_seconds_bucket{from="small",to="large",le="0.000032"} 5"#,
            r#"tokenrouter:forward_seconds_count{kind="extend",model_name="small"} 0"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is missing in\n{text}");
        }
        assert!(!text.contains(r#"from="large",to="large""#));
    }
}
