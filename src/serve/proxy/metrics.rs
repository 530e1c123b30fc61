//! `/metrics`: Prometheus text.

use super::{live::Finished, router::RouterStats};
use std::{
    fmt::Write,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Counters since start.
#[derive(Debug, Default)]
pub struct Counters {
    turns: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    completion_tokens: AtomicU64,
    turn_micros: AtomicU64,
    /// Requests by outcome.
    pub requests: AtomicU64,
    /// Requests that were refused or failed.
    pub errors: AtomicU64,
}

impl Counters {
    /// A turn was answered.
    pub fn on_turn(&self, finished: &Finished, took: Duration) {
        let add = |counter: &AtomicU64, n: u64| {
            counter.fetch_add(n, Ordering::Relaxed);
        };
        add(&self.turns, 1);
        add(&self.prompt_tokens, finished.prompt_tokens as u64);
        add(&self.cached_tokens, u64::from(finished.cached_tokens));
        add(&self.completion_tokens, finished.tokens.len() as u64);
        add(&self.turn_micros, took.as_micros() as u64);
    }

    /// The text.
    pub fn render(&self, open_sessions: usize, router: &RouterStats) -> String {
        let mut out = String::new();
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        let mut line = |name: &str, kind: &str, help: &str, rows: &[(String, f64)]| {
            // Writing to a string cannot fail.
            let _ = writeln!(out, "# HELP legorl_{name} {help}\n# TYPE legorl_{name} {kind}");
            for (labels, value) in rows {
                let _ = writeln!(out, "legorl_{name}{labels} {value}");
            }
        };
        let one = |value: f64| vec![(String::new(), value)];
        line(
            "proxy_sessions_open",
            "gauge",
            "Sessions that are open.",
            &one(open_sessions as f64),
        );
        line(
            "proxy_requests_total",
            "counter",
            "Chat requests.",
            &one(load(&self.requests)),
        );
        line(
            "proxy_errors_total",
            "counter",
            "Chat requests refused or failed.",
            &one(load(&self.errors)),
        );
        line(
            "proxy_turns_total",
            "counter",
            "Turns sampled.",
            &one(load(&self.turns)),
        );
        line(
            "proxy_prompt_tokens_total",
            "counter",
            "Prompt tokens of sampled turns.",
            &one(load(&self.prompt_tokens)),
        );
        line(
            "proxy_cached_tokens_total",
            "counter",
            "Prompt tokens taken from the prefix cache.",
            &one(load(&self.cached_tokens)),
        );
        line(
            "proxy_completion_tokens_total",
            "counter",
            "Tokens sampled.",
            &one(load(&self.completion_tokens)),
        );
        line(
            "proxy_turn_seconds_total",
            "counter",
            "Time from request to reply, summed.",
            &one(load(&self.turn_micros) / 1e6),
        );
        let by = |name: &str, value: String| format!("{{{name}=\"{value}\"}}");
        let admitted: Vec<_> = router
            .admitted
            .iter()
            .map(|(r, n)| (by("reason", format!("{r:?}")), *n as f64))
            .collect();
        line(
            "scheduler_admitted_total",
            "counter",
            "Turns admitted, by reason.",
            &admitted,
        );
        let waited: Vec<_> = router
            .waited
            .iter()
            .map(|(r, n)| (by("reason", format!("{r:?}")), *n as f64))
            .collect();
        line(
            "scheduler_waited_total",
            "counter",
            "Turns that had to wait, by first reason.",
            &waited,
        );
        line(
            "scheduler_waiting",
            "gauge",
            "Turns that wait for admission.",
            &one(router.waiting as f64),
        );
        line(
            "scheduler_refused_total",
            "counter",
            "Turns refused at the deadline.",
            &one(router.refused as f64),
        );
        line(
            "router_moved_total",
            "counter",
            "Generations moved off a lost replica.",
            &one(router.moved as f64),
        );
        let replica = |value: &dyn Fn(&crate::base::EngineStatus, u64) -> f64| -> Vec<(String, f64)> {
            let rows = router.replicas.iter();
            rows.map(|(id, (status, owned))| (by("replica", id.to_string()), value(status, *owned)))
                .collect()
        };
        line(
            "engine_running",
            "gauge",
            "Sequences in the running batch.",
            &replica(&|s, _| f64::from(s.running)),
        );
        line(
            "engine_waiting",
            "gauge",
            "Requests not yet in the batch.",
            &replica(&|s, _| f64::from(s.waiting)),
        );
        line(
            "engine_kv_tokens_used",
            "gauge",
            "KV tokens in use, cached prefixes included.",
            &replica(&|s, _| s.kv_tokens_used as f64),
        );
        line(
            "engine_kv_tokens_total",
            "gauge",
            "KV capacity in tokens.",
            &replica(&|s, _| s.kv_tokens_total as f64),
        );
        line(
            "engine_kv_tokens_owned",
            "gauge",
            "KV tokens that sessions own.",
            &replica(&|_, owned| owned as f64),
        );
        line(
            "engine_weight_version",
            "gauge",
            "Version of the weights in use.",
            &replica(&|s, _| f64::from(s.version.0)),
        );
        line(
            "engine_generated_tokens_total",
            "counter",
            "Tokens sampled.",
            &replica(&|s, _| s.generated_tokens as f64),
        );
        line(
            "engine_prefill_tokens_total",
            "counter",
            "Prompt tokens computed.",
            &replica(&|s, _| s.prefill_tokens as f64),
        );
        out
    }
}
