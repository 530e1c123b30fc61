#!/bin/bash
set -e
cd /app
cp willow.txt grass
