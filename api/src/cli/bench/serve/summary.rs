//! The figures of one server. Pure. Invariant: names and meanings are those of `vllm bench serve` where it has them;
//! tokens are what the server's `usage` counted.

use super::client::Trouble;
use super::drive::{Block, Sent};
use super::options::{Goal, Settings, Timed};
use super::stream::Answer;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// How times are distributed, in ms.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Spread {
    /// How many there are.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// Their median.
    pub median: f64,
    /// Their standard deviation.
    pub std: f64,
    /// Percentiles by their number, such as `99`; between two values as the straight line between them.
    pub percentiles: BTreeMap<String, f64>,
}

impl Spread {
    /// The spread of seconds, told in ms; zeros when there are none.
    pub fn of(mut seconds: Vec<f64>, percentiles: &[f64]) -> Spread {
        seconds.sort_by(f64::total_cmp);
        let count = seconds.len();
        let mean = total(seconds.iter().copied()) / count.max(1) as f64;
        let variance = total(seconds.iter().map(|value| (value - mean).powi(2))) / count.max(1) as f64;
        let at = |percentile: f64| 1e3 * quantile(&seconds, percentile / 100.0);
        Spread {
            count,
            mean: 1e3 * mean,
            median: at(50.0),
            std: 1e3 * variance.sqrt(),
            percentiles: percentiles.iter().map(|percentile| (percentile.to_string(), at(*percentile))).collect(),
        }
    }
}

/// The sum; that of nothing is 0, where the library's is -0 and prints so.
fn total(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |sum, value| sum + value)
}

/// The value below which this part of sorted values lies.
pub fn quantile(sorted: &[f64], part: f64) -> f64 {
    let place = part * sorted.len().saturating_sub(1) as f64;
    let (below, above) = (place.floor() as usize, place.ceil() as usize);
    match (sorted.get(below), sorted.get(above)) {
        (Some(low), Some(high)) => low + (high - low) * (place - below as f64),
        _ => 0.0,
    }
}

/// Requests that failed for one reason.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Failures {
    /// The kind.
    pub reason: String,
    /// How many.
    pub count: usize,
    /// What was said about the first of them.
    pub said: String,
}

/// The figures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct Summary {
    /// Requests that were answered.
    pub completed: usize,
    /// Requests that were not.
    pub failed: usize,
    /// Requests that were cut because the run was ended early; they are neither.
    pub cut: usize,
    /// Why requests failed.
    pub failures: Vec<Failures>,
    /// Seconds that the requests took together.
    pub duration: f64,
    /// Tokens of the prompts.
    pub total_input_tokens: u64,
    /// Of these, tokens that the server had already.
    pub cached_input_tokens: u64,
    /// Tokens of the answers.
    pub total_output_tokens: u64,
    /// Answers a second.
    pub request_throughput: f64,
    /// Answers a second that met the goals; none without --goodput.
    pub request_goodput: Option<f64>,
    /// Tokens of answers a second.
    pub output_throughput: f64,
    /// Tokens of answers in the best second.
    pub max_output_tokens_per_s: f64,
    /// Most requests that ran at once.
    pub max_concurrent_requests: usize,
    /// Tokens of prompts and answers a second.
    pub total_token_throughput: f64,
    /// ms by which the request that was sent latest after its time was late; 0 without --rate.
    pub max_late_ms: f64,
    /// Times to the first token.
    pub ttft_ms: Spread,
    /// Mean times of a request's tokens after the first.
    pub tpot_ms: Spread,
    /// Times between tokens.
    pub itl_ms: Spread,
    /// Times to the end.
    pub e2el_ms: Spread,
    /// Tokens of answers by the model that made them; empty where the server does not tell.
    pub by_model: BTreeMap<String, u64>,
    /// Times control moved between models; none where the server does not tell.
    pub hops: Option<u64>,
}

/// Everything one server was asked, on one clock that runs only while it was asked.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Its blocks.
    pub blocks: Vec<Block>,
}

impl Measured {
    /// All requests; times from the start of the first block, without the time between blocks.
    pub fn sent(&self) -> impl Iterator<Item = (f64, &Sent)> {
        let mut begun = 0.0;
        self.blocks.iter().flat_map(move |block| {
            let offset = begun;
            begun += block.seconds;
            block.sent.iter().map(move |sent| (offset + sent.at, sent))
        })
    }

    /// All answers with the times at which they were asked for.
    pub fn answers(&self) -> impl Iterator<Item = (f64, &Answer)> {
        self.sent().filter_map(|(at, sent)| Some((at, sent.outcome.as_ref()?.as_ref().ok()?)))
    }

    /// Seconds that the blocks took.
    pub fn seconds(&self) -> f64 {
        total(self.blocks.iter().map(|block| block.seconds))
    }

    /// Tokens that came in each span of so many seconds; the last one is not whole.
    pub fn tokens_by(&self, span: f64) -> Vec<f64> {
        let mut spans = vec![0.0; (self.seconds() / span).ceil() as usize];
        for (begun, answer) in self.answers() {
            for (at, tokens) in &answer.arrivals {
                if let Some(sum) = spans.get_mut(((begun + at) / span) as usize) {
                    *sum += tokens;
                }
            }
        }
        spans
    }

    /// The figures.
    pub fn summary(&self, goals: &[Goal], percentiles: &[f64]) -> Summary {
        let answers: Vec<&Answer> = self.answers().map(|(_, answer)| answer).collect();
        let failures = self.failures();
        let sum = |each: fn(&Answer) -> u32| answers.iter().map(|answer| u64::from(each(answer))).sum::<u64>();
        let (input, output) = (sum(|answer| answer.usage.prompt_tokens), sum(|answer| answer.usage.completion_tokens));
        let duration = self.seconds();
        let rate = |count: f64| if duration > 0.0 { count / duration } else { 0.0 };
        let good = answers.iter().filter(|answer| goals.iter().all(|goal| goal.met(answer))).count();
        let output_throughput = rate(output as f64);
        let best = self.tokens_by(1.0).into_iter().fold(0.0, f64::max);
        let spread = |times: Vec<f64>| Spread::of(times, percentiles);
        let mut by_model = BTreeMap::new();
        for (name, tokens) in answers.iter().flat_map(|answer| answer.usage.by_model()) {
            *by_model.entry(name).or_default() += u64::from(tokens);
        }
        Summary {
            completed: answers.len(),
            failed: failures.iter().map(|failures| failures.count).sum(),
            cut: self.sent().filter(|(_, sent)| sent.outcome.is_none()).count(),
            failures,
            duration,
            total_input_tokens: input,
            cached_input_tokens: sum(|answer| answer.usage.cached()),
            total_output_tokens: output,
            request_throughput: rate(answers.len() as f64),
            request_goodput: (!goals.is_empty()).then(|| rate(good as f64)),
            output_throughput,
            max_output_tokens_per_s: best.max(output_throughput),
            max_concurrent_requests: self.blocks.iter().map(|block| block.peak).max().unwrap_or(0),
            total_token_throughput: rate((input + output) as f64),
            max_late_ms: 1e3 * self.blocks.iter().map(|block| block.late).fold(0.0, f64::max),
            ttft_ms: spread(answers.iter().map(|answer| answer.ttft).collect()),
            tpot_ms: spread(answers.iter().filter_map(|answer| answer.tpot()).collect()),
            itl_ms: spread(answers.iter().flat_map(|answer| answer.gaps.iter().copied()).collect()),
            e2el_ms: spread(answers.iter().map(|answer| answer.e2el).collect()),
            by_model,
            hops: answers.iter().filter_map(|answer| answer.usage.hops()).map(u64::from).reduce(|a, b| a + b),
        }
    }

    fn failures(&self) -> Vec<Failures> {
        let mut found: Vec<Failures> = Vec::new();
        let troubles = self.sent().filter_map(|(_, sent)| sent.outcome.as_ref()?.as_ref().err());
        for Trouble { reason, said } in troubles {
            match found.iter_mut().find(|failures| failures.reason == *reason) {
                Some(failures) => failures.count += 1,
                None => found.push(Failures { reason: reason.clone(), count: 1, said: said.clone() }),
            }
        }
        found.sort_by_key(|failures| std::cmp::Reverse(failures.count));
        found
    }
}

impl Goal {
    fn met(&self, answer: &Answer) -> bool {
        let seconds = match self.timed {
            Timed::Ttft => answer.ttft,
            Timed::Tpot => answer.tpot().unwrap_or(0.0),
            Timed::E2el => answer.e2el,
        };
        1e3 * seconds <= self.limit_ms
    }
}

const WIDTH: usize = 50;

/// The block that `vllm bench serve` prints, with a line for each further figure.
pub fn block(summary: &Summary, settings: &Settings, title: &str) -> String {
    let mut out = Lines(format!("{:=^WIDTH$}\n", format!(" {title} ")));
    out.whole("Successful requests", summary.completed as u64);
    out.whole("Failed requests", summary.failed as u64);
    if summary.cut > 0 {
        out.whole("Requests cut by the stop", summary.cut as u64);
    }
    if let Some(most) = settings.max_concurrency {
        out.whole("Maximum request concurrency", u64::from(most));
    }
    if let Some(rate) = settings.request_rate {
        out.real("Request rate configured (RPS)", rate);
    }
    out.real("Benchmark duration (s)", summary.duration);
    out.whole("Total input tokens", summary.total_input_tokens);
    out.whole("Total generated tokens", summary.total_output_tokens);
    out.real("Request throughput (req/s)", summary.request_throughput);
    if let Some(goodput) = summary.request_goodput {
        out.real("Request goodput (req/s)", goodput);
    }
    out.real("Output token throughput (tok/s)", summary.output_throughput);
    out.real("Peak output token throughput (tok/s)", summary.max_output_tokens_per_s);
    out.real("Peak concurrent requests", summary.max_concurrent_requests as f64);
    out.real("Total token throughput (tok/s)", summary.total_token_throughput);
    if settings.request_rate.is_some() {
        out.real("Latest sent after its time (ms)", summary.max_late_ms);
    }
    out.times(("Time to First Token", "TTFT"), &summary.ttft_ms);
    out.times(("Time per Output Token (excl. 1st token)", "TPOT"), &summary.tpot_ms);
    out.times(("Inter-token Latency", "ITL"), &summary.itl_ms);
    out.times(("End-to-end Latency", "E2EL"), &summary.e2el_ms);
    out.routed(summary);
    out.failed(&summary.failures);
    out.0.push_str(&format!("{}\n", "=".repeat(WIDTH)));
    out.0
}

/// Lines of a name and a value.
struct Lines(String);

impl Lines {
    fn line(&mut self, name: &str, value: &str) {
        self.0.push_str(&format!("{:<40} {value:<10}\n", format!("{name}:")));
    }

    fn whole(&mut self, name: &str, value: u64) {
        self.line(name, &value.to_string());
    }

    fn real(&mut self, name: &str, value: f64) {
        self.line(name, &format!("{value:.2}"));
    }

    fn head(&mut self, title: &str) {
        self.0.push_str(&format!("{title:-^WIDTH$}\n"));
    }

    fn times(&mut self, (title, name): (&str, &str), spread: &Spread) {
        self.head(title);
        for (what, value) in [("Mean", spread.mean), ("Median", spread.median), ("Std", spread.std)] {
            self.real(&format!("{what} {name} (ms)"), value);
        }
        let mut percentiles: Vec<(&String, &f64)> = spread.percentiles.iter().collect();
        percentiles.sort_by(|a, b| a.1.total_cmp(b.1));
        for (percentile, value) in percentiles {
            self.real(&format!("P{percentile} {name} (ms)"), *value);
        }
    }

    fn routed(&mut self, summary: &Summary) {
        let all: u64 = summary.by_model.values().sum();
        if summary.by_model.is_empty() || all == 0 {
            return;
        }
        self.head("Routing");
        for (name, tokens) in &summary.by_model {
            let share = 100.0 * *tokens as f64 / all as f64;
            self.line(&format!("Tokens by {name}"), &format!("{tokens:<10} ({share:.1} %)"));
        }
        if let Some(hops) = summary.hops {
            self.whole("Hops between models", hops);
        }
    }

    fn failed(&mut self, failures: &[Failures]) {
        if failures.is_empty() {
            return;
        }
        self.head("Failures");
        for Failures { reason, count, said } in failures {
            self.line(reason, &format!("{count:<10} {said}"));
        }
    }
}

#[cfg(test)]
pub mod tests {
    use super::super::stream::Usage;
    use super::*;

    fn usage(tokens: u32) -> Usage {
        serde_json::from_value(serde_json::json!({ "prompt_tokens": 10, "completion_tokens": tokens,
            "completion_tokens_details": { "by_model": { "small": tokens - 1, "large": 1 }, "hops": 2 } }))
        .expect("usage")
    }

    /// An answer whose first token came after `ttft` and each further one a tenth of a second later.
    pub fn answer(ttft: f64, tokens: u32) -> Answer {
        let times: Vec<f64> = (0..tokens).map(|token| ttft + 0.1 * f64::from(token)).collect();
        Answer {
            ttft,
            e2el: times.last().copied().unwrap_or(ttft),
            gaps: vec![0.1; tokens as usize - 1],
            arrivals: times.into_iter().map(|at| (at, 1.0)).collect(),
            usage: usage(tokens),
        }
    }

    /// Two blocks of one server: three answers, two failures, one request that was cut.
    pub fn example() -> Measured {
        let sent = |at, outcome| Sent { at, outcome };
        let refused = || Some(Err(Trouble::new("HTTP 503", "no room")));
        let first =
            vec![sent(0.0, Some(Ok(answer(0.5, 6)))), sent(0.0, refused()), sent(1.0, Some(Ok(answer(0.7, 11))))];
        let second = vec![sent(0.0, Some(Ok(answer(0.9, 2)))), sent(0.0, refused()), sent(0.5, None)];
        let block = |sent, peak| Block { sent, seconds: 3.0, peak, late: 0.25 };
        Measured { blocks: vec![block(first, 2), block(second, 3)] }
    }

    #[test]
    fn figures_are_those_of_the_requests() {
        let goals = [Goal { timed: Timed::Ttft, limit_ms: 800.0 }, Goal { timed: Timed::E2el, limit_ms: 1100.0 }];
        let summary = example().summary(&goals, &[50.0, 99.9]);
        assert_eq!((summary.completed, summary.failed, summary.cut), (3, 2, 1));
        assert_eq!((summary.total_input_tokens, summary.total_output_tokens), (30, 19));
        assert_eq!((summary.duration, summary.request_throughput, summary.max_concurrent_requests), (6.0, 0.5, 3));
        assert!((summary.output_throughput - 19.0 / 6.0).abs() < 1e-9);
        assert!((summary.total_token_throughput - 49.0 / 6.0).abs() < 1e-9);
        assert_eq!(summary.request_goodput, Some(1.0 / 6.0), "one is below both limits");
        assert!((summary.ttft_ms.mean - 700.0).abs() < 1e-9 && (summary.ttft_ms.median - 700.0).abs() < 1e-9);
        assert!((summary.ttft_ms.std - 1e3 * (0.08f64 / 3.0).sqrt()).abs() < 1e-9);
        assert!((summary.ttft_ms.percentiles["99.9"] - 899.6).abs() < 1e-9, "{:?}", summary.ttft_ms);
        assert!((summary.itl_ms.mean - 100.0).abs() < 1e-9 && summary.itl_ms.count == 16);
        assert!((summary.tpot_ms.mean - 100.0).abs() < 1e-9 && (summary.e2el_ms.mean - 1e3 * 3.7 / 3.0).abs() < 1e-6);
        assert_eq!(summary.failures, [Failures { reason: "HTTP 503".into(), count: 2, said: "no room".into() }]);
        assert_eq!((summary.by_model["small"], summary.by_model["large"], summary.hops), (16, 3, Some(6)));
        let seconds = example().tokens_by(1.0);
        assert_eq!((seconds.len(), seconds.iter().sum::<f64>()), (6, 19.0));
        assert_eq!(summary.max_output_tokens_per_s, 8.0, "{seconds:?}");
        assert_eq!(example().summary(&[], &[]).request_goodput, None);
        assert_eq!(Measured::default().summary(&goals, &[99.0]).completed, 0);
    }

    #[test]
    fn figures_of_nothing_are_plain_zeros() {
        let summary = Measured::default().summary(&[], &[99.0]);
        let Spread { mean, median, std, .. } = summary.ttft_ms;
        assert_eq!(format!("{:.2} {mean:.2} {median:.2} {std:.2}", summary.duration), "0.00 0.00 0.00 0.00");
    }

    #[test]
    fn quantiles_lie_between_values() {
        let sorted = [1.0, 2.0, 4.0];
        assert_eq!((quantile(&sorted, 0.0), quantile(&sorted, 0.75), quantile(&sorted, 1.0)), (1.0, 3.0, 4.0));
        assert_eq!(quantile(&[], 0.5), 0.0);
    }
}
