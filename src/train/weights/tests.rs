//! A push reaches every replica, and names those that fail.

use super::*;
use crate::base::{DType, WeightTensor};
use async_trait::async_trait;
use std::sync::Mutex;

/// What a replica does with an update.
enum Behaviour {
    Good,
    OldVersion,
    FlippedByte,
    Refuses,
    Silent,
}

struct Replica {
    behaviour: Behaviour,
    serves: Mutex<Option<PolicyVersion>>,
}

impl Replica {
    fn new(behaviour: Behaviour) -> Arc<Self> {
        Arc::new(Self {
            behaviour,
            serves: Mutex::new(None),
        })
    }
}

#[async_trait]
impl WeightTarget for Replica {
    async fn update_weights(&self, update: Arc<WeightUpdate>) -> Result<WeightAck, WeightError> {
        let mut tensors = update.tensors.clone();
        match self.behaviour {
            Behaviour::Silent => std::future::pending().await,
            Behaviour::Refuses => {
                return Err(WeightError::Tensor {
                    name: "lm_head.weight".into(),
                    problem: "unknown".into(),
                })
            }
            Behaviour::OldVersion => {
                return Ok(WeightAck {
                    version: PolicyVersion(1),
                    checksum: update.checksum,
                })
            }
            Behaviour::FlippedByte => {
                let mut bytes = tensors[0].data.to_vec();
                bytes[0] ^= 1;
                tensors[0].data = bytes.into();
            }
            Behaviour::Good => {}
        }
        *self.serves.lock().unwrap() = Some(update.version);
        Ok(WeightAck {
            version: update.version,
            checksum: WeightUpdate::checksum_of(&tensors),
        })
    }
}

fn update() -> Arc<WeightUpdate> {
    Arc::new(WeightUpdate::new(
        PolicyVersion(7),
        vec![WeightTensor {
            name: "w".into(),
            dtype: DType::F32,
            shape: vec![2],
            data: vec![1, 2, 3, 4, 5, 6, 7, 8].into(),
        }],
    ))
}

fn targets(replicas: &[Arc<Replica>]) -> Vec<Arc<dyn WeightTarget>> {
    replicas
        .iter()
        .map(|r| r.clone() as Arc<dyn WeightTarget>)
        .collect()
}

#[tokio::test]
async fn every_replica_gets_the_version() {
    let replicas = [Replica::new(Behaviour::Good), Replica::new(Behaviour::Good)];
    let report = push(update(), &targets(&replicas), Duration::from_secs(60))
        .await
        .unwrap();
    assert_eq!(
        (report.version, report.replicas, report.size_bytes),
        (PolicyVersion(7), 2, 8)
    );
    assert!(replicas
        .iter()
        .all(|r| *r.serves.lock().unwrap() == Some(PolicyVersion(7))));
}

#[tokio::test]
async fn failing_replicas_are_named_and_hold_up_nobody() {
    let replicas = [
        Replica::new(Behaviour::OldVersion),
        Replica::new(Behaviour::Silent),
        Replica::new(Behaviour::Good),
        Replica::new(Behaviour::FlippedByte),
        Replica::new(Behaviour::Refuses),
    ];
    let error = push(update(), &targets(&replicas), Duration::from_millis(100))
        .await
        .unwrap_err();
    let names: Vec<u32> = error.failed.iter().map(|(r, _)| r.0).collect();
    assert_eq!(names, [0, 1, 3, 4]);
    assert!(matches!(
        error.failed[0].1,
        PushProblem::Version(PolicyVersion(1))
    ));
    assert!(matches!(error.failed[1].1, PushProblem::Deadline(_)));
    assert!(matches!(error.failed[2].1, PushProblem::Checksum { .. }));
    assert!(matches!(error.failed[3].1, PushProblem::Refused(_)));
    let text = error.to_string();
    assert!(
        text.contains("4 of 5") && text.contains("replica 1: no answer within 0.1 s"),
        "{text}"
    );
    assert_eq!(*replicas[2].serves.lock().unwrap(), Some(PolicyVersion(7)));
}
