//! The table at the end of a run: a pure function of what was recorded.

use super::metrics::Row;
use std::{collections::BTreeMap, fmt::Write as _, path::PathBuf, time::Duration};

/// Most steps that are listed one by one.
const MAX_LISTED: usize = 24;

/// Width of the bar for a reward of 1.
const BAR: f64 = 20.0;

const REWARD: &str = "critic/score/mean";
const THROUGHPUT: &str = "perf/throughput";
const STEP_TIME: &str = "timing_s/step";
const PEARSON: &str = "training/rollout_actor_probs_pearson_corr";
const TOKENS: &str = "perf/total_num_tokens";

/// What the table is made of.
#[derive(Clone, Debug)]
pub struct Summary<'a> {
    /// Rows by step, as [`super::metrics::read`] gives them.
    pub rows: &'a BTreeMap<u64, Row>,
    /// Wall-clock time of this attempt.
    pub wall: Duration,
    /// Where things lie: label and path.
    pub places: &'a [(&'a str, PathBuf)],
}

/// The table.
pub fn render(summary: &Summary<'_>) -> String {
    let mut out = String::new();
    rewards(&mut out, summary.rows);
    held_out(&mut out, summary.rows);
    stages(&mut out, summary.rows);
    totals(&mut out, summary);
    let width = summary
        .places
        .iter()
        .map(|(label, _)| label.len())
        .max()
        .unwrap_or(0);
    for (label, path) in summary.places {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "  {label:<width$}  {}", path.display());
    }
    out
}

fn has_reward(row: &Row) -> bool {
    row.contains_key(REWARD)
}

/// Steps were made, and in none of them had a trial a verdict.
pub fn learned_nothing(rows: &BTreeMap<u64, Row>) -> bool {
    rows.values().any(|row| row.contains_key(STEP_TIME)) && !rows.values().any(has_reward)
}

fn rewards(out: &mut String, rows: &BTreeMap<u64, Row>) {
    let steps: Vec<(u64, &Row)> = rows
        .iter()
        .filter(|(_, row)| has_reward(row))
        .map(|(s, r)| (*s, r))
        .collect();
    if steps.is_empty() {
        // A step whose trials all failed has a row without a reward.
        out.push_str(if learned_nothing(rows) {
            "no step had a trial with a verdict\n"
        } else {
            "no step was finished\n"
        });
        return;
    }
    let _ = writeln!(
        out,
        "{:>5}  {:<28} {:>9}  {:>8}  {:>9}",
        "step", "reward", "tokens/s", "seconds", "pearson"
    );
    for index in listed(steps.len()) {
        let (step, row) = steps[index];
        let reward = row[REWARD];
        let bar = "█".repeat((reward.clamp(0.0, 1.0) * BAR).round() as usize);
        let _ = writeln!(
            out,
            "{step:>5}  {reward:>6.3} {bar:<21} {:>9}  {:>8}  {:>9}",
            number(row.get(THROUGHPUT), 0),
            number(row.get(STEP_TIME), 1),
            number(row.get(PEARSON), 5),
        );
    }
    out.push('\n');
}

/// First, last, and evenly chosen ones between them.
fn listed(count: usize) -> Vec<usize> {
    if count <= MAX_LISTED {
        return (0..count).collect();
    }
    (0..MAX_LISTED)
        .map(|i| i * (count - 1) / (MAX_LISTED - 1))
        .collect()
}

fn number(value: Option<&f64>, digits: usize) -> String {
    value.map_or("-".into(), |v| format!("{v:.digits$}"))
}

fn held_out(out: &mut String, rows: &BTreeMap<u64, Row>) {
    let mut by_key: BTreeMap<&str, Vec<(u64, f64)>> = BTreeMap::new();
    for (step, row) in rows {
        for (key, value) in row.iter().filter(|(key, _)| key.starts_with("val-core/")) {
            by_key.entry(key).or_default().push((*step, *value));
        }
    }
    for (key, values) in &by_key {
        let course: Vec<String> = values
            .iter()
            .map(|(step, value)| format!("{value:.3} (step {step})"))
            .collect();
        let _ = writeln!(out, "held out  {key}: {}", course.join(" → "));
    }
    if !by_key.is_empty() {
        out.push('\n');
    }
}

fn stages(out: &mut String, rows: &BTreeMap<u64, Row>) {
    let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
    for row in rows.values() {
        for (key, value) in row {
            // `update_actor/forward` is a part of `update_actor`, and `trainer_step` the sum of stages.
            let stage = key
                .strip_prefix("timing_s/")
                .filter(|s| !s.contains('/') && *s != "trainer_step");
            if let Some(stage) = stage {
                *sums.entry(stage).or_default() += value;
            }
        }
    }
    // Steps, and the validation between them.
    let steps = sums.remove("step");
    let between = sums.get("testing").copied().unwrap_or_default();
    let whole = steps.map_or_else(|| sums.values().sum(), |steps| steps + between);
    let mut stages: Vec<(&str, f64)> = sums.into_iter().collect();
    stages.sort_by(|a, b| b.1.total_cmp(&a.1));
    if stages.is_empty() {
        return;
    }
    let width = stages
        .iter()
        .map(|(stage, _)| stage.len())
        .max()
        .unwrap_or(0)
        .max("stage".len());
    let _ = writeln!(out, "{:<width$}  {:>9}  {:>5}", "stage", "seconds", "share");
    for (stage, seconds) in stages {
        let share = if whole > 0.0 { 100.0 * seconds / whole } else { 0.0 };
        let _ = writeln!(out, "{stage:<width$}  {seconds:>9.1}  {share:>4.0}%");
    }
    out.push('\n');
}

fn totals(out: &mut String, summary: &Summary<'_>) {
    let steps = summary
        .rows
        .values()
        .filter(|row| row.contains_key(REWARD))
        .count();
    let tokens: f64 = summary.rows.values().filter_map(|row| row.get(TOKENS)).sum();
    let seconds: f64 = summary.rows.values().filter_map(|row| row.get(STEP_TIME)).sum();
    let _ = write!(out, "{steps} steps, this attempt took {}", clock(summary.wall));
    if tokens > 0.0 {
        let _ = write!(out, ", {tokens:.0} tokens trained");
        if seconds > 0.0 {
            let _ = write!(out, " ({:.0} tokens/s over all steps)", tokens / seconds);
        }
    }
    out.push('\n');
}

fn clock(time: Duration) -> String {
    let seconds = time.as_secs();
    match (seconds / 3600, seconds / 60 % 60, seconds % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s} s"),
        (h, m, _) => format!("{h} h {m} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(pairs: &[(&str, f64)]) -> Row {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), *v)).collect()
    }

    #[test]
    fn the_table_shows_rewards_held_out_tasks_stages_and_places() {
        let rows = BTreeMap::from([
            (0, row(&[("val-core/harbor/reward/mean@4", 0.375)])),
            (
                1,
                row(&[
                    (REWARD, 0.25),
                    (THROUGHPUT, 1234.4),
                    (STEP_TIME, 10.0),
                    (PEARSON, 0.999_991),
                    (TOKENS, 12_000.0),
                    ("timing_s/gen", 7.5),
                    ("timing_s/update_actor", 2.5),
                ]),
            ),
            (
                2,
                row(&[
                    (REWARD, 1.0),
                    (STEP_TIME, 10.0),
                    ("timing_s/gen", 7.5),
                    ("val-core/harbor/reward/mean@4", 0.9),
                ]),
            ),
        ]);
        let places = [
            ("checkpoints", PathBuf::from("/ckpt")),
            ("logs", PathBuf::from("/logs")),
        ];
        let text = render(&Summary {
            rows: &rows,
            wall: Duration::from_secs(83),
            places: &places,
        });
        let expected = " step  reward                        tokens/s   seconds    pearson
    1   0.250 █████                      1234      10.0    0.99999
    2   1.000 ████████████████████          -      10.0          -

held out  val-core/harbor/reward/mean@4: 0.375 (step 0) → 0.900 (step 2)

stage           seconds  share
gen                15.0    75%
update_actor        2.5    12%

2 steps, this attempt took 1 min 23 s, 12000 tokens trained (600 tokens/s over all steps)
  checkpoints  /ckpt
  logs         /logs
";
        assert_eq!(text, expected);
    }

    #[test]
    fn a_long_run_lists_some_steps_with_the_first_and_the_last() {
        let rows: BTreeMap<u64, Row> = (1..=500).map(|step| (step, row(&[(REWARD, 0.5)]))).collect();
        let text = render(&Summary {
            rows: &rows,
            wall: Duration::ZERO,
            places: &[],
        });
        let steps: Vec<&str> = text
            .lines()
            .skip(1)
            .take(MAX_LISTED)
            .filter_map(|l| l.split_whitespace().next())
            .collect();
        assert_eq!(
            (steps.len(), steps[0], steps[MAX_LISTED - 1]),
            (MAX_LISTED, "1", "500")
        );
    }

    #[test]
    fn validation_counts_into_the_whole_and_steps_without_a_verdict_are_told() {
        let rows = BTreeMap::from([(
            1,
            row(&[
                (STEP_TIME, 5.0),
                ("timing_s/gen", 5.0),
                ("timing_s/testing", 15.0),
            ]),
        )]);
        let text = render(&Summary {
            rows: &rows,
            wall: Duration::from_secs(20),
            places: &[],
        });
        assert!(text.starts_with("no step had a trial with a verdict\n"), "{text}");
        assert!(learned_nothing(&rows));
        assert!(text.contains("testing       15.0    75%\n"), "{text}");
        assert!(text.contains("gen            5.0    25%\n"), "{text}");
    }

    #[test]
    fn a_run_without_steps_says_so() {
        let text = render(&Summary {
            rows: &BTreeMap::new(),
            wall: Duration::from_secs(3),
            places: &[],
        });
        assert!(text.starts_with("no step was finished"), "{text}");
        assert!(!learned_nothing(&BTreeMap::new()));
    }
}
